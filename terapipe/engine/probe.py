"""Times one stage's slices inside a rank, with the code that runs them in training."""

import csv
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from terapipe.cost.profile import POINT
from terapipe.engine.mesh import Mesh
from terapipe.engine.rank import RankRun
from terapipe.engine.stage import Stage, StepInputs
from terapipe.errors import SpecError
from terapipe.slicing import MicrobatchSlices, Slicing

Point = tuple[int, int, int]  # slice_tokens, context_tokens, n_sequences
PROBE = -1  # in a job's order: a repeat of the measurement, between two steps
PROBE_COLUMNS = [*POINT, "together", "repeat", "forward_ms", "backward_ms"]


class Prober:
    """Measures this rank's stages, a repeat of the whole grid at a time.

    A repeat goes over all points, each rank while the others wait, and over some with all ranks at
    once, so that a machine whose speed wanders slows them alike. Rows go to probe-rank-N.csv.
    """

    def __init__(self, mesh: Mesh, directory: Path, alone: Sequence[Point], together: Sequence[Point]) -> None:
        self.mesh, self.alone, self.together = mesh, alone, together
        self.run = RankRun(mesh, directory)
        self.stages = {index: stage for index, stage in self.run.stages.items() if isinstance(stage, Stage)}
        if len(self.stages) != len(self.run.stages):
            raise SpecError("emulated stages have no cost to measure: it was put in.")
        self.file = (directory / f"probe-rank-{mesh.rank}.csv").open("w", newline="", encoding="utf-8")
        csv.writer(self.file).writerow(PROBE_COLUMNS)
        self.n_repeats = 0
        self._measure_all(repeat=None)  # the first run of anything is not timed

    def measure(self) -> None:
        """One repeat of every point."""
        self._measure_all(self.n_repeats)
        self.n_repeats += 1
        self.file.flush()

    def close(self) -> None:
        """Close the files."""
        self.file.close()
        self.run.close()

    def _measure_all(self, repeat: int | None) -> None:
        shuffle = np.random.default_rng(self.n_repeats)
        for turn in [*range(self.mesh.n_ranks), None]:
            self.mesh.barrier()
            for point in shuffle.permutation(self.together if turn is None else self.alone).tolist():
                if turn is None:
                    self.mesh.barrier()
                if turn in (self.mesh.rank, None):
                    self._measure(point, turn is None, repeat)

    def _measure(self, point: Point, together: bool, repeat: int | None) -> None:
        for index, stage in self.stages.items():
            times = time_slice(stage, point, self.run.spec.model.vocab_size, self.run.dtype)
            if repeat is not None:
                csv.writer(self.file).writerow([index, *point, together, repeat, *times])


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
