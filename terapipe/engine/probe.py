"""Times one stage's slices inside a rank, with the code that runs them in training."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from terapipe.engine.mesh import Mesh
from terapipe.engine.rank import RankRun
from terapipe.engine.stage import Stage, StepInputs
from terapipe.errors import SpecError
from terapipe.slicing import MicrobatchSlices, Slicing

Point = tuple[int, int, int]  # slice_tokens, context_tokens, n_sequences


def probe(
    mesh: Mesh, directory: Path, job: Mapping[str, Any], report: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Measure this rank's stages: first each rank while the others wait, then all at once.

    `job` holds the points to measure "alone" and "together", and "n_repeats".
    """
    run = RankRun(mesh, directory)
    stages = {index: stage for index, stage in run.stages.items() if isinstance(stage, Stage)}
    if len(stages) != len(run.stages):
        raise SpecError("emulated stages have no cost to measure: it was put in.")
    rows: list[dict[str, Any]] = []
    turns = [(rank, point) for rank in range(mesh.n_ranks) for point in job["alone"]]
    for rank, point in [*turns, *((None, point) for point in job["together"])]:
        mesh.barrier()
        if rank in (mesh.rank, None):
            rows += _measure(run, stages, tuple(point), job["n_repeats"], together=rank is None)
        if mesh.rank == 0:
            report({"event": "step"})
    run.close()
    return rows


def _measure(run: RankRun, stages: dict[int, Stage], point: Point, n_repeats: int, together: bool) -> list[dict[str, Any]]:
    where = dict(zip(("slice_tokens", "context_tokens", "n_sequences"), point, strict=True))
    return [
        {"stage": index, **where, "together": together, "repeat": repeat, "forward_ms": forward, "backward_ms": backward}
        for index, stage in stages.items()
        for repeat, (forward, backward) in enumerate(time_slice(stage, point, run.spec.model.vocab_size, run.dtype, n_repeats))
    ]


def time_slice(stage: Stage, point: Point, vocab_size: int, dtype: torch.dtype, n_repeats: int) -> list[tuple[float, float]]:
    """Forward and backward ms of one slice behind its context; the first run is not counted."""
    length, context, n_sequences = point
    lengths = (context, length) if context else (length,)
    slicing = Slicing((MicrobatchSlices(n_sequences, lengths),))
    tokens = torch.randint(vocab_size, (n_sequences, slicing.seq_tokens))
    stage.begin_step(StepInputs(slicing, [tokens], [tokens], tokens.numel(), seed=0, step=0))
    place = len(lengths) - 1
    if context:
        with torch.no_grad():
            stage.forward(0, 0, _features(stage, n_sequences, context, dtype))
        stage.kept.clear()
    times = []
    for _ in range(n_repeats + 1):
        received = _features(stage, n_sequences, length, dtype)
        gradient = None if stage.is_last else torch.randn(n_sequences, length, stage.d_model, dtype=dtype)
        start = time.perf_counter()
        stage.forward(0, place, received)
        middle = time.perf_counter()
        stage.backward(0, place, gradient)
        times.append(((middle - start) * 1e3, (time.perf_counter() - middle) * 1e3))
    if context:
        stage.contexts.pop(0).release()
    return times[1:]


def _features(stage: Stage, n_sequences: int, length: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if stage.is_first else torch.randn(n_sequences, length, stage.d_model, dtype=dtype)


def time_fixed_work(mesh: Mesh, n_repeats: int = 15) -> list[float]:
    """Milliseconds of a fixed computation on all ranks at once: does the machine still run as fast?"""
    left = torch.full((512, 512), 0.5)
    times = []
    for _ in range(n_repeats + 1):
        mesh.barrier()
        start = time.perf_counter()
        for _ in range(8):
            torch.mm(left, left)
        times.append((time.perf_counter() - start) * 1e3)
    return times[1:]
