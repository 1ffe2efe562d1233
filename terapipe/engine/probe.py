"""Times stages' slices inside a rank, with the code that runs them in training."""

import csv
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

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
HALVES = ["input_ms", "weight_ms"]  # two more columns, where the backward's halves are measured too


class Prober:
    """Measures this rank's stages, a repeat of the whole grid at a time.

    A rank measures the stages that the spec's schedule puts on it; where the schedule has other
    ranks than measure, stages are dealt to them in turn. A repeat goes over all points, each rank while
    the others wait, and over some with all ranks at once, so that a machine whose speed wanders slows
    them alike. With `split_backward` each slice goes forward and back twice: F and B as they run where
    no backward is split, then F, I and W. Rows go to probe-rank-N.csv as they are measured; what is
    there already counts.
    """

    def __init__(
        self,
        mesh: Mesh,
        directory: Path,
        alone: Sequence[Point],
        together: Sequence[Point],
        device: str = "cpu",
        split_backward: bool = False,
    ) -> None:
        self.mesh, self.alone, self.together = mesh, alone, together
        self.spec = RunSpec.from_json((directory / "spec.json").read_text("utf-8"))
        if self.spec.device == "emulated":
            raise SpecError("emulated stages have no cost to measure: it was put in.")
        self.clock = make_clock(device, mesh.rank)
        homes = self.spec.schedules[0].stage_to_rank
        if self.spec.n_ranks != mesh.n_ranks:
            homes = tuple(index % mesh.n_ranks for index in range(self.spec.n_stages))
        self.n_turns = max(homes.count(rank) for rank in range(mesh.n_ranks))
        self.stages = {
            index: build_stage(self.spec, index, self.clock.device, split_backward)
            for index, home in enumerate(homes)
            if home == mesh.rank
        }
        self.columns = PROBE_COLUMNS + HALVES * split_backward
        self.times: dict[Cell, list[tuple[float, ...]]] = {cell: [] for cell in self._cells()}
        self._open(directory / f"probe-rank-{mesh.rank}.csv")

    @classmethod
    def of(cls, mesh: Mesh, probe: Mapping[str, Any]) -> "Prober":
        """The prober that a probe, as `profiling.plan_probe` writes it, describes."""
        names = ("alone", "together", "device", "split_backward")
        return cls(mesh, Path(probe["directory"]), *(probe[name] for name in names))

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
            self.times[cell].append(tuple(float(row[name]) for name in self.columns if name.endswith("_ms")))
            last = max(last, int(row["repeat"]))
        self.next_repeat = 1 + max(self.mesh.gather(last))
        self.file = path.open("a", newline="", encoding="utf-8", buffering=1)  # by lines: none is lost with the process
        self.file.truncate(len(whole))
        self.writer = csv.writer(self.file, lineterminator="\n")
        if not whole:
            self.writer.writerow(self.columns)

    def _measure_all(self, repeat: int | None) -> None:
        shuffle = np.random.default_rng(self.next_repeat)
        for turn in [*range(self.mesh.n_ranks), None]:
            self.mesh.barrier()
            for point in shuffle.permutation(self.together if turn is None else self.alone).tolist():
                if turn in (self.mesh.rank, None):
                    self._measure(point, turn is None, repeat)

    def _measure(self, point: Point, together: bool, repeat: int | None) -> None:
        stages = list(self.stages.items())
        for turn in range(self.n_turns if together else len(stages)):
            if together:
                self.mesh.barrier()
            # With all at once, a rank of fewer stages than others has them compute beside its own once more.
            index, stage = stages[turn % len(stages)]
            times = self._time(stage, point)
            if repeat is not None and turn < len(stages):
                self.times[(index, *point, together)].append(times)
                self.writer.writerow([index, *point, together, repeat, *times])

    def _time(self, stage: Stage, point: Point) -> tuple[float, ...]:
        """Milliseconds of F and B of one slice, and of I and W."""
        size = (self.spec.slicings[0].seq_tokens, self.spec.model.vocab_size)
        if stage.weight_queue is None:
            return time_slice(stage, point, *size, self.clock)
        stage.weight_queue.is_on = False
        whole = time_slice(stage, point, *size, self.clock)
        stage.weight_queue.is_on = True
        return *whole, *time_slice(stage, point, *size, self.clock)[1:]


def time_slice(stage: Stage, point: Point, seq_tokens: int, vocab_size: int, clock: Clock) -> tuple[float, ...]:
    """Milliseconds of a slice of a sequence, behind the keys and values of an earlier one: F, B; F, I, W of a split stage."""
    length, context, n_sequences = point
    lengths = tuple(tokens for tokens in (context, length, seq_tokens - context - length) if tokens > 0)
    slicing = Slicing((MicrobatchSlices(n_sequences, lengths),))
    tokens = torch.randint(vocab_size, (n_sequences, slicing.seq_tokens), device=clock.device)
    stage.begin_step(StepInputs(slicing, [tokens], [tokens], tokens.numel(), seed=0, step=0))
    place = 1 if context else 0
    shape = (n_sequences, length, stage.d_model)
    received = None if stage.is_first else torch.randn(shape, dtype=stage.dtype, device=clock.device)
    gradient = None if stage.is_last else torch.randn(shape, dtype=stage.dtype, device=clock.device)
    is_split = stage.weight_queue is not None and stage.weight_queue.is_on
    clock.settle()
    marks = [clock.mark()]
    stage.forward(0, place, received)
    marks.append(clock.mark())
    if is_split:
        stage.input_backward(0, place, gradient)
        marks.append(clock.mark())
        stage.weight_backward(0, place)
    else:
        stage.backward(0, place, gradient)
    marks.append(clock.mark())
    clock.settle()
    if context:
        stage.contexts.pop(0).release()
    return tuple(clock.between_ms(start, end) for start, end in pairwise(marks))


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
