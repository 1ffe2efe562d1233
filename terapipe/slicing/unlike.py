"""Slicings where stages differ: a good answer, and a proven bound on how far it can be from the best.

The latency is the longest path through the grid of slices × stages. Three things meet here: bounds
from the exact searches of `boxes` over some of the paths; candidates, the slicings that those and
simpler costs like best, improved by moving boundaries; and, for one sequence, the search over
prefixes (`paths`), which is complete where few prefixes can still become the best.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from terapipe.cost import CostModel
from terapipe.errors import SlicingError
from terapipe.slicing.boxes import ROUNDING, Cut, Found, Program, cells_of, search_boxes
from terapipe.slicing.latency import Objective, distinct
from terapipe.slicing.optimal import SlicingPlan
from terapipe.slicing.paths import longest_path, rest_bounds, search_prefixes
from terapipe.slicing.program import Cells
from terapipe.slicing.tables import Grid, is_extrapolated, slice_costs
from terapipe.slicing.value import MicrobatchSlices, Slicing

MOST_PREFIXES, FEWEST_PREFIXES = 256, 16  # units that the search over prefixes takes; more are searched on a coarser grid
SEARCH_STEPS, MOST_LABELS = 2e8, 256  # what bounds the labels it keeps a prefix
N_LIMITS = 48  # intervals of the slowest slice in the bounds for what follows a prefix


def search_unlike_stages(
    costs: Sequence[CostModel], grid: Grid, batch_sequences: int, objective: Objective, max_slices: int | None
) -> SlicingPlan:
    """The best slicing found for stages that differ, with a proven lower bound (see `optimal_slicing`)."""
    stages = _Stages(costs, grid, batch_sequences, objective, max_slices or 0)
    bound, candidates = stages.relaxed()
    cut = stages.improved(min(candidates, key=stages.latency))
    if batch_sequences == 1:
        cut, searched = _search_prefixes(stages, cut)
        bound = max(bound, searched)
    latency, bound = stages.latency(cut), bound * (1 - ROUNDING)
    slicing = Slicing(tuple(MicrobatchSlices(size, grid.lengths(ends)) for size, ends in cut))
    return SlicingPlan(
        slicing=slicing,
        latency_ms=latency,
        lower_bound_ms=latency if bound >= latency * (1 - 2 * ROUNDING) else bound,
        t_max_ms=float(stages.slice_times(cut).max(axis=(1, 2)).sum()),
        n_programs=stages.n_programs,
        objective=objective,
        n_stages=len(costs),
        extrapolated=is_extrapolated(distinct(costs), grid, range(1, batch_sequences + 1)),
    )


class _Stages:
    """The slice times of unlike stages, and the latency of a cut."""

    def __init__(
        self, costs: Sequence[CostModel], grid: Grid, batch_sequences: int, objective: Objective, max_slices: int
    ) -> None:
        different = distinct(costs)
        self.costs, self.grid, self.objective = costs, grid, objective
        self.batch_sequences, self.max_slices = batch_sequences, max_slices
        self.row_of = np.array([different.index(cost) for cost in costs])
        times = slice_costs(different, grid, range(1, batch_sequences + 1))
        self.times = times.sum(axis=1, keepdims=True) if objective == "paper" else times  # row, phase, size, cell
        self.n_programs = 0

    def slice_times(self, cut: Cut) -> Cells:
        """Times of a cut's slices: (n_phases, n_stages, n_slices)."""
        parts = [self.times[:, :, size - 1, cells_of(ends, self.grid.n_units)] for size, ends in cut]
        return np.ascontiguousarray(np.concatenate(parts, axis=2)[self.row_of].swapaxes(0, 1))

    def latency(self, cut: Cut) -> float:
        """The longest path of each phase, added up."""
        return sum(longest_path(phase) for phase in self.slice_times(cut))

    def added(self, first: int, end: int) -> Cells:
        """Times of stages first … end−1 added up: (n_phases, n_sizes, n_cells)."""
        total = np.zeros(self.times.shape[1:])
        for row, count in enumerate(np.bincount(self.row_of[first:end], minlength=len(self.times))):
            if count:  # 0 × a forbidden slice is not 0
                total += count * self.times[row]
        return total

    def shares(self, first: int) -> tuple[Cells, Cells]:
        """Of stages `first` … last: a slice's least time on any, over phases, and what all of them add to it, a phase."""
        least = self.times[np.unique(self.row_of[first:])].min(axis=0)
        with np.errstate(invalid="ignore"):
            extra = self.added(first, len(self.row_of)) - least
        return least.sum(axis=0), np.where(np.isnan(extra), np.inf, extra)

    def relaxed(self) -> tuple[float, list[Cut]]:
        """A bound on every slicing's latency, and slicings that may be good."""
        # A path along the fastest stage for each slice, through all stages with the slowest: no longer than the longest.
        through = self._solve(*self.shares(0), 1)
        along = [self._along(stage) for stage in range(len(self.costs))]
        alike = [combine(self.times[self.row_of], axis=0) for combine in (np.mean, np.max)]
        simpler = [self._solve(each.sum(axis=0), each, len(self.costs) - 1) for each in alike]
        return max([through.latency, *along]), [through.cut, *(each.cut for each in simpler), *self._equal_slices()]

    def _equal_slices(self) -> Iterator[Cut]:
        """Microbatches of equal size, in 1, 2, 4, … slices as equal as the grid allows."""
        n, batch = self.grid.n_units, self.batch_sequences
        for size in (size for size in range(1, batch + 1) if batch % size == 0):
            n_slices = 1
            while n_slices <= min(n, self.max_slices or n):
                yield [(size, np.arange(1, n_slices + 1) * n // n_slices)] * (batch // size)
                n_slices *= 2

    def _solve(self, summed: Cells, limited: Cells, weight: float) -> Found:
        program = Program(summed, limited, weight, self.grid.n_units, self.batch_sequences, self.max_slices)
        found = search_boxes(program)
        self.n_programs += found.n_programs
        return found

    def _along(self, stage: int) -> float:
        """A bound: every slice's time on one stage, the first slice's before it and the last slice's after it."""
        n = self.grid.n_units
        before, after = (self.added(*ends).sum(axis=0) for ends in ((0, stage), (stage + 1, len(self.costs))))
        first, last = np.arange(n), cells_of(np.full(n, n), n, np.arange(n))
        summed = self.times[self.row_of[stage]].sum(axis=0)
        if self.batch_sequences > 1:  # which microbatch comes first is open: the least of any
            return self._solve(summed, summed[np.newaxis], 0).latency + float(before[:, first].min() + after[:, last].min())
        summed = summed.copy()
        summed[:, first] += before[:, first]
        summed[:, last] += after[:, last]
        return self._solve(summed, summed[np.newaxis], 0).latency

    def improved(self, cut: Cut) -> Cut:
        """The cut after moving, adding and removing boundaries, and changing places of microbatches, while that helps."""
        best, step = self.latency(cut), max(1, self.grid.n_units // 8)
        while step:
            better = next((other for other in self._neighbours(cut, step) if self.latency(other) < best * (1 - ROUNDING)), None)
            if better is None:
                step //= 2
            else:
                cut, best = better, self.latency(better)
        return cut

    def _neighbours(self, cut: Cut, step: int) -> Iterator[Cut]:
        for index, (first, second) in enumerate(pairwise(cut)):
            if first[0] != second[0] or not np.array_equal(first[1], second[1]):
                yield [*cut[:index], second, first, *cut[index + 2 :]]
        for index, (size, ends) in enumerate(cut):
            bounds = np.concatenate([[0], ends])
            inner = np.arange(len(ends) - 1)
            moved = [np.delete(ends, place) for place in inner]
            if not self.max_slices or len(ends) < self.max_slices:
                middles = (bounds[:-1] + bounds[1:]) // 2
                moved += [np.insert(ends, place, middle) for place, middle in enumerate(middles) if middle > bounds[place]]
            for place in inner:
                for by in (-step, step):
                    if bounds[place] < ends[place] + by < ends[place + 1]:
                        moved.append(ends + by * (np.arange(len(ends)) == place))
            for other in moved:
                yield [*cut[:index], (size, other), *cut[index + 1 :]]


def _search_prefixes(stages: _Stages, cut: Cut) -> tuple[Cut, float]:
    """The search over prefixes of one sequence, and its bound; on a coarser grid, where there is none, for long ones."""
    n = stages.grid.n_units
    factor = next(factor for factor in range(1, n + 1) if n % factor == 0 and n // factor <= MOST_PREFIXES)
    if factor == 1:
        return _best_prefixes(stages, stages.latency(cut), cut)
    if n // factor < FEWEST_PREFIXES:
        return cut, 0.0
    grid = Grid(stages.grid.seq_tokens, stages.grid.granularity_tokens * factor, stages.grid.min_slice_tokens)
    try:
        coarse = _Stages(stages.costs, grid, 1, stages.objective, stages.max_slices)
    except SlicingError:  # the coarse slices are all forbidden
        return cut, 0.0
    found, _ = _best_prefixes(coarse, stages.latency(cut), [])
    finer = [stages.improved([(size, ends * factor) for size, ends in found])] if found else []
    return min([cut, *finer], key=stages.latency), 0.0


def _best_prefixes(stages: _Stages, latency: float, otherwise: Cut) -> tuple[Cut, float]:
    """The best cut below a latency, or `otherwise`; and a bound, the best's own latency if the search was complete."""
    n, n_stages, n_phases = stages.grid.n_units, len(stages.costs), stages.times.shape[1]
    rest: Cells = np.stack([_rest_bounds(*stages.shares(stage), n) for stage in range(n_stages)])
    width = int(np.clip(SEARCH_STEPS / (n * n * n_stages * n_phases), 8, MOST_LABELS))
    times = np.ascontiguousarray(stages.times[:, :, 0])
    most = stages.max_slices
    value, ends, left_out = search_prefixes(times, stages.row_of, rest, n, width, most, latency)
    return [(1, ends)] if len(ends) else otherwise, min(value, left_out)


def _rest_bounds(shared: Cells, extra: Cells, n: int) -> Cells:
    added = extra.sum(axis=0)[0]
    limits = np.unique(np.quantile(added[np.isfinite(added)], np.linspace(0, 1, N_LIMITS + 1)))
    return rest_bounds(shared[0], added, limits, n)
