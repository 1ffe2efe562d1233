"""The exact search over slowest slices: branch and bound over boxes of limits, a dynamic program each.

It minimises Σ value + weight·(max first + max second) over the slicings of a batch: eq. (6) of
TeraPipe (ICML 2021) with the slowest slice of each phase apart, and with the split of the batch into
microbatches (section 3.4) inside the search, so that all microbatches share the same slowest slices.
"""

import heapq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from terapipe.errors import SlicingError
from terapipe.slicing.program import Cells, Ends, least_later, least_sums, trace_ends

ROUNDING = 1e-12  # relative: sums of the same slices in another order differ by less

Cut = list[tuple[int, Ends]]  # (sequences of the microbatch, ends of its slices in units)


@dataclass(frozen=True)
class Program:
    """What is minimised: values to be summed and values whose maxima count, packed a microbatch size.

    Attributes
    ----------
    summed : array (n_sizes, n_cells)
        Added up; a microbatch of size index i has i + 1 sequences.
    limited : array (n_phases, n_sizes, n_cells)
        One or two phases, the largest value of each counting `weight` times.
    n_units, batch_sequences, max_slices : int
        Units a sequence, sequences to place, and most slices a microbatch (0: any).
    """

    summed: Cells
    limited: Cells
    weight: float
    n_units: int
    batch_sequences: int = 1
    max_slices: int = 0
    later: Cells = field(init=False)

    def __post_init__(self) -> None:
        later = [[least_later(values, self.n_units) for values in phase] for phase in self.limited]
        object.__setattr__(self, "later", np.array(later))

    def solve(self, limits: Cells) -> tuple[float, Cut]:
        """Least sum over all splits of the batch and all slicings within the limits; infinite where there is none."""
        sizes = range(self.summed.shape[0])
        sums = [self._least_sums(size, limits) for size in sizes]
        total, parts = _fill_batch([float(least[:, -1].min()) for least in sums], self.batch_sequences)
        traced = {size: self._trace(size, limits, sums[size]) for size in set(parts)}
        return total, [(size + 1, traced[size]) for size in parts]

    def _least_sums(self, size: int, limits: Cells) -> Cells:
        tables = self.summed[size], self.limited[:, size], self.later[:, size], limits, self.n_units
        least = least_sums(*tables, 0)
        if self.max_slices and np.isfinite(least[0, -1]) and len(self._trace(size, limits, least)) > self.max_slices:
            return least_sums(*tables, self.max_slices)
        return least

    def _trace(self, size: int, limits: Cells, least: Cells) -> Ends:
        return trace_ends(self.summed[size], self.limited[:, size], limits, self.n_units, least)

    def slowest(self, cut: Cut) -> Cells:
        """The largest limited value of each phase in a cut."""
        largest = [self.limited[:, size - 1, cells_of(ends, self.n_units)].max(axis=1) for size, ends in cut]
        slowest: Cells = np.max(largest, axis=0)
        return slowest


def cells_of(ends: Ends, n: int, starts: Ends | None = None) -> Ends:
    """Where slices stand among the packed cells, by their ends; they begin where the one before ends, or at `starts`."""
    starts = np.concatenate([[0], ends[:-1]]) if starts is None else starts
    return starts * n - starts * (starts - 1) // 2 + ends - starts - 1


def _fill_batch(least: list[float], batch_sequences: int) -> tuple[float, list[int]]:
    """The knapsack: sizes (index + 1 sequences each) that fill the batch at the least sum, larger ones first."""
    totals, last = [0.0], [0]
    for filled in range(1, batch_sequences + 1):
        choices = [(totals[filled - size - 1] + least[size], -size) for size in range(min(len(least), filled))]
        total, size = min(choices)
        totals.append(total)
        last.append(-size)
    if not np.isfinite(totals[-1]):
        return float("inf"), []
    parts, left = [], batch_sequences
    while left:
        parts.append(last[left])
        left -= last[left] + 1
    return totals[-1], sorted(parts, reverse=True)


class Found(NamedTuple):
    """The best cut: its value, a proven lower bound, its slowest slices, and the number of programs solved."""

    latency: float
    cut: Cut
    slowest: float
    n_programs: int


@dataclass(order=True)
class _Box:
    """Slicings whose slowest first value is in [low[0], high[0]], slowest second in [low[1], high[1]].

    `total` is the least sum under the upper corner; `slowest` are the maxima of the slicing that has it.
    """

    bound: float
    order: int
    low: Cells = field(compare=False)
    high: Cells = field(compare=False)
    total: float = field(compare=False)
    slowest: Cells = field(compare=False)


def search_boxes(program: Program) -> Found:
    """The exact optimum of a program.

    A sum never rises as a limit rises, so in a box of limits the total is at least the sum under its
    upper corner plus weight × its lower corner. Boxes that cannot beat the best cut are dropped, the
    others halved, until none is left. Each solved program's own cut is a candidate.
    """
    return _Search(program).run()


class _Search:
    """One run of the branch and bound."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.best, self.cut, self.slowest = np.inf, Cut(), np.zeros(len(program.limited))
        self.n_programs = 0

    def run(self) -> Found:
        limited = self.program.limited
        highest = np.array([phase[np.isfinite(phase)].max() for phase in limited])
        boxes = [self._solve(np.zeros(len(limited)), highest)]
        while boxes and self._is_open(boxes[0]):
            for part in self._split(heapq.heappop(boxes)):
                if self._is_open(part):
                    heapq.heappush(boxes, part)
        if not np.isfinite(self.best):
            most = self.program.max_slices
            limit = f" in at most max_slices={most} slices" if most else ""
            raise SlicingError(
                f"no slicing covers the sequence{limit}: too many slices are forbidden (infinite cost, min_slice_tokens). "
                "Allow more slices, other lengths, or look where the cost is infinite."
            )
        return Found(float(self.best), self.cut, float(self.slowest.sum()), self.n_programs)

    def _is_open(self, box: _Box) -> bool:
        """Whether the box can hold something better, beyond the rounding of its sums."""
        return box.bound < self.best * (1 - ROUNDING)

    def _bound(self, total: float, low: Cells) -> float:
        return float(total + self.program.weight * low.sum())

    def _solve(self, low: Cells, high: Cells) -> _Box:
        """The box with its program solved; the cut found competes for the best."""
        self.n_programs += 1
        total, cut = self.program.solve(high)
        if not cut:
            return _Box(np.inf, self.n_programs, low, high, np.inf, high)
        slowest = self.program.slowest(cut)
        latency = self._bound(total, slowest)
        if latency < self.best:
            self.best, self.cut, self.slowest = latency, cut, slowest
        return _Box(self._bound(total, low), self.n_programs, low, high, total, slowest)

    def _split(self, box: _Box) -> list[_Box]:
        """Halve the longer side of what is open: below the slowest slices of the box's own cut.

        A slicing at or above them is no better than that cut: its sum is no smaller and neither are
        its maxima. The upper half keeps the box's program, only the lower needs its own.
        """
        gaps = box.slowest - box.low
        side = int(gaps.argmax())
        if gaps[side] <= 0:
            return []
        cut, below = _halve(float(box.low[side]), float(box.slowest[side]))
        high, low = box.high.copy(), box.low.copy()
        high[side], low[side] = below, cut
        upper = replace(box, bound=self._bound(box.total, low), low=low)
        return [self._solve(box.low, high), upper]


def _halve(low: float, high: float) -> tuple[float, float]:
    """The middle of [low, high] and the next number below it; `high` itself once they nearly touch."""
    middle = (low + high) / 2
    cut = middle if middle - low > 1e-5 * high else high
    return cut, float(np.nextafter(cut, -np.inf))
