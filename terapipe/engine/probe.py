"""Times stages' slices inside a rank, with the code that runs them in training."""

import csv
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from terapipe.cost.profile import POINT, median_error
from terapipe.engine.clock import Clock, make_clock
from terapipe.engine.mesh import Mesh
from terapipe.engine.rank import build_stage
from terapipe.engine.stage import Stage, StepInputs
from terapipe.errors import SpecError
from terapipe.slicing import MicrobatchSlices, Slicing
from terapipe.spec import RunSpec

Point = tuple[int, int, int]  # slice_tokens, context_tokens, n_sequences
Cell = tuple[int, int, int, int, bool]  # stage, point, together
PROBE = -1  # in a job's order: a repeat of the measurement, between two steps
PROBE_COLUMNS = [*POINT, "together", "repeat", "forward_ms", "backward_ms"]


class Prober:
    """Measures this rank's stages, a repeat of the whole grid at a time.

    Stages are dealt to the ranks in turn. A repeat goes over all points, each rank while the others
    wait, and over some with all ranks at once, so that a machine whose speed wanders slows them
    alike. Rows go to probe-rank-N.csv as they are measured; what is there already counts.
    """

    def __init__(
        self, mesh: Mesh, directory: Path, alone: Sequence[Point], together: Sequence[Point], device: str = "cpu"
    ) -> None:
        self.mesh, self.alone, self.together = mesh, alone, together
        self.spec = RunSpec.from_json((directory / "spec.json").read_text("utf-8"))
        if self.spec.device == "emulated":
            raise SpecError("emulated stages have no cost to measure: it was put in.")
        self.clock = make_clock(device, mesh.rank)
        indices = range(mesh.rank, self.spec.n_stages, mesh.n_ranks)
        self.stages = {index: build_stage(self.spec, index, self.clock.device) for index in indices}
        self.times: dict[Cell, list[tuple[float, float]]] = {cell: [] for cell in self._cells()}
        self._open(directory / f"probe-rank-{mesh.rank}.csv")

    def warm_up(self) -> None:
        """Run everything once without timing it."""
        self._measure_all(repeat=None)

    def measure(self) -> None:
        """One repeat of every point."""
        self._measure_all(self.next_repeat)
        self.next_repeat += 1

    def progress(self) -> tuple[int, float]:
        """Repeats that every point of every rank has, and the 90th percentile over points of `median_error`."""
        least = min(len(times) for times in self.times.values())
        errors = [median_error(np.array(times)) for cell, times in self.times.items() if not cell[-1]]
        ranks = self.mesh.gather((least, np.ravel(errors).tolist()))
        everywhere = np.concatenate([found for _, found in ranks])
        return min(count for count, _ in ranks), float(np.quantile(everywhere, 0.9, method="inverted_cdf"))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _cells(self) -> Iterable[Cell]:
        for index in self.stages:
            for points, together in ((self.alone, False), (self.together, True)):
                for length, context, n_sequences in points:
                    yield index, length, context, n_sequences, together

    def _open(self, path: Path) -> None:
        """Take over the rows that an earlier measurement left, also one that was killed in the middle."""
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # a line cut short is no row
        last = -1
        for row in csv.DictReader(whole.decode().splitlines()):
            length, context, n_sequences = (int(row[name]) for name in POINT[1:])
            cell = (int(row["stage"]), length, context, n_sequences, row["together"] == "True")
            self.times[cell].append((float(row["forward_ms"]), float(row["backward_ms"])))
            last = max(last, int(row["repeat"]))
        self.next_repeat = 1 + max(self.mesh.gather(last))
        self.file = path.open("a", newline="", encoding="utf-8", buffering=1)  # by lines: none is lost with the process
        self.file.truncate(len(whole))
        self.writer = csv.writer(self.file, lineterminator="\n")
        if not whole:
            self.writer.writerow(PROBE_COLUMNS)

    def _measure_all(self, repeat: int | None) -> None:
        shuffle = np.random.default_rng(self.next_repeat)
        for turn in [*range(self.mesh.n_ranks), None]:
            self.mesh.barrier()
            for point in shuffle.permutation(self.together if turn is None else self.alone).tolist():
                if turn in (self.mesh.rank, None):
                    self._measure(point, turn is None, repeat)

    def _measure(self, point: Point, together: bool, repeat: int | None) -> None:
        for index, stage in self.stages.items():
            if together:
                self.mesh.barrier()
            times = time_slice(stage, point, self.spec.slicings[0].seq_tokens, self.spec.model.vocab_size, self.clock)
            if repeat is not None:
                self.times[(index, *point, together)].append(times)
                self.writer.writerow([index, *point, together, repeat, *times])


def time_slice(stage: Stage, point: Point, seq_tokens: int, vocab_size: int, clock: Clock) -> tuple[float, float]:
    """Forward and backward ms of one slice of a sequence, behind the keys and values of an earlier one."""
    length, context, n_sequences = point
    lengths = tuple(tokens for tokens in (context, length, seq_tokens - context - length) if tokens > 0)
    slicing = Slicing((MicrobatchSlices(n_sequences, lengths),))
    tokens = torch.randint(vocab_size, (n_sequences, slicing.seq_tokens), device=clock.device)
    stage.begin_step(StepInputs(slicing, [tokens], [tokens], tokens.numel(), seed=0, step=0))
    place = 1 if context else 0
    shape = (n_sequences, length, stage.d_model)
    received = None if stage.is_first else torch.randn(shape, dtype=stage.dtype, device=clock.device)
    gradient = None if stage.is_last else torch.randn(shape, dtype=stage.dtype, device=clock.device)
    clock.settle()
    start = clock.mark()
    stage.forward(0, place, received)
    middle = clock.mark()
    stage.backward(0, place, gradient)
    end = clock.mark()
    clock.settle()
    if context:
        stage.contexts.pop(0).release()
    return clock.between_ms(start, middle), clock.between_ms(middle, end)


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
