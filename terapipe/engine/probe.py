"""Times one stage's slices inside a rank, with the code that runs them in training."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
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
    """Measure this rank's stages: each rank while the others wait, and all at once.

    `job` holds the points to measure "alone" and "together", and "n_repeats". Every repeat goes once
    over all points, ranks and both conditions, so that a machine whose speed wanders slows them alike;
    a round before the first is not counted.
    """
    run = RankRun(mesh, directory)
    stages = {index: stage for index, stage in run.stages.items() if isinstance(stage, Stage)}
    if len(stages) != len(run.stages):
        raise SpecError("emulated stages have no cost to measure: it was put in.")
    rows: list[dict[str, Any]] = []
    for repeat in range(-1, job["n_repeats"]):
        for turn in [*range(mesh.n_ranks), None]:
            points = job["together" if turn is None else "alone"]
            mesh.barrier()
            for point in np.random.default_rng(repeat + 1).permutation(points).tolist():
                if turn is None:
                    mesh.barrier()
                if turn in (mesh.rank, None):
                    rows += _measure(run, stages, tuple(point), turn is None, repeat)
            if mesh.rank == 0:
                report({"event": "step"})
    run.close()
    return [row for row in rows if row["repeat"] >= 0]


def _measure(run: RankRun, stages: dict[int, Stage], point: Point, together: bool, repeat: int) -> list[dict[str, Any]]:
    where = dict(zip(("slice_tokens", "context_tokens", "n_sequences"), point, strict=True))
    rows = []
    for index, stage in stages.items():
        forward, backward = time_slice(stage, point, run.spec.model.vocab_size, run.dtype)
        times = {"together": together, "repeat": repeat, "forward_ms": forward, "backward_ms": backward}
        rows.append({"stage": index, **where, **times})
    return rows


def time_slice(stage: Stage, point: Point, vocab_size: int, dtype: torch.dtype) -> tuple[float, float]:
    """Forward and backward ms of one slice behind its context, whose keys and values are those of an earlier slice."""
    length, context, n_sequences = point
    lengths = (context, length) if context else (length,)
    slicing = Slicing((MicrobatchSlices(n_sequences, lengths),))
    tokens = torch.randint(vocab_size, (n_sequences, slicing.seq_tokens))
    stage.begin_step(StepInputs(slicing, [tokens], [tokens], tokens.numel(), seed=0, step=0))
    place = len(lengths) - 1
    received = _features(stage, n_sequences, length, dtype)
    gradient = None if stage.is_last else torch.randn(n_sequences, length, stage.d_model, dtype=dtype)
    start = time.perf_counter()
    stage.forward(0, place, received)
    middle = time.perf_counter()
    stage.backward(0, place, gradient)
    end = time.perf_counter()
    if context:
        stage.contexts.pop(0).release()
    return (middle - start) * 1e3, (end - middle) * 1e3


def _features(stage: Stage, n_sequences: int, length: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if stage.is_first else torch.randn(n_sequences, length, stage.d_model, dtype=dtype)


def time_fixed_work(mesh: Mesh, n_repeats: int = 200) -> list[float]:
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
