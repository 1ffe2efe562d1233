"""Longest paths through the grid of slices × stages, compiled: the latency where stages differ.

`search_prefixes` looks for the slicing whose longest path is shortest, a prefix of the sequence at a
time. A label is one way to cut a prefix: when each stage has finished it, forward and backward. A
label that is nowhere earlier than another of the same prefix is dropped: nothing it leads to is better.
"""

import numpy as np
from numba import njit

from terapipe.slicing.program import Cells, Ends, row_offset


@njit(cache=True)
def longest_path(times: Cells) -> float:
    """Longest path of (n_stages, n_slices) milliseconds, from the first corner to the last."""
    ends = np.zeros(times.shape[0])
    for place in range(times.shape[1]):
        before = 0.0
        for stage in range(times.shape[0]):
            before = max(before, ends[stage]) + times[stage, place]
            ends[stage] = before
    return float(ends[-1])


@njit(cache=True)
def rest_bounds(shared: Cells, extra: Cells, limits: Cells, n: int) -> Cells:
    """For each prefix, a bound on the path through the rest: least Σ shared + max extra over slicings of it.

    `shared` is a slice's least time on any stage, `extra` what all stages add to it: some slice's path
    goes through all of them. For each interval between two limits, the least sum under its upper end
    plus its lower end is a bound.
    """
    bounds = np.full(n + 1, np.inf)
    bounds[n] = 0.0
    lower = 0.0
    for limit in limits:
        sums = np.full(n + 1, np.inf)
        sums[n] = 0.0
        for start in range(n - 1, -1, -1):
            offset = row_offset(start, n) - start - 1
            for end in range(start + 1, n + 1):
                if extra[offset + end] <= limit:
                    sums[start] = min(sums[start], shared[offset + end] + sums[end])
        for start in range(n):
            bounds[start] = min(bounds[start], sums[start] + lower)
        lower = limit
    return bounds


@njit(cache=True)
def _advance(before: Cells, times: Cells, stage_row: Ends, cell: int, after: Cells) -> None:
    """When every stage has finished one more slice, in each phase."""
    for phase in range(before.shape[0]):
        arrived = 0.0
        for stage in range(before.shape[1]):
            arrived = max(arrived, before[phase, stage]) + times[stage_row[stage], phase, cell]
            after[phase, stage] = arrived


@njit(cache=True)
def _bound(label: Cells, rest: Cells, position: int) -> float:
    """A path to some stage so far, and from there on a bound for the rest: the largest over stages."""
    largest = 0.0
    for stage in range(label.shape[1]):
        largest = max(largest, label[:, stage].sum() + rest[stage, position])
    return largest


@njit(cache=True)
def _choose(labels: Cells, counts: Ends, bounds: Cells, width: int) -> tuple[Ends, float]:
    """Up to `width` labels that no other dominates, best bounds first, and the least bound of those left out.

    A label that dominates another has no larger bound, so looking in the order of bounds suffices.
    """
    chosen = np.empty(min(width, len(bounds)), dtype=np.int64)
    n_chosen = 0
    for index in np.argsort(bounds):
        dominated = False
        for other in chosen[:n_chosen]:
            if counts[other] <= counts[index] and (labels[other] <= labels[index]).all():
                dominated = True
                break
        if dominated:
            continue
        if n_chosen == width:
            return chosen, bounds[index]
        chosen[n_chosen] = index
        n_chosen += 1
    return chosen[:n_chosen], np.inf


@njit(cache=True)
def search_prefixes(
    times: Cells, stage_row: Ends, rest: Cells, n: int, width: int, max_slices: int, best: float
) -> tuple[float, Ends, float]:
    """The shortest longest path below `best`, keeping at most `width` labels a prefix.

    `times` is (n_rows, n_phases, n_cells), `stage_row` the row of each stage, `rest` a bound for what
    follows each prefix from each stage on, (n_stages, n+1). Returns the value, the slices' ends (none
    where nothing is below `best`) and the least bound among labels left out: infinite where the search
    was complete.
    """
    n_phases, n_stages = times.shape[1], len(stage_row)
    kept = np.zeros((n + 1, width, n_phases, n_stages))
    kept_counts = np.zeros((n + 1, width), dtype=np.int64)  # of slices; all 0 where any number is allowed
    parents = np.zeros((n + 1, width, 2), dtype=np.int64)
    n_kept = np.zeros(n + 1, dtype=np.int64)
    n_kept[0] = 1
    least_left_out = np.inf
    for end in range(1, n + 1):
        n_new = n_kept[:end].sum()
        labels, counts = np.empty((n_new, n_phases, n_stages)), np.zeros(n_new, dtype=np.int64)
        bounds, origins = np.empty(n_new), np.empty((n_new, 2), dtype=np.int64)
        n_new = 0
        for start in range(end):
            cell = row_offset(start, n) + end - start - 1
            for which in range(n_kept[start]):
                counts[n_new] = kept_counts[start, which] + (max_slices > 0)
                _advance(kept[start, which], times, stage_row, cell, labels[n_new])
                bounds[n_new] = _bound(labels[n_new], rest, end)
                origins[n_new, 0], origins[n_new, 1] = start, which
                n_new += bounds[n_new] < best and counts[n_new] <= max_slices
        chosen, left_out = _choose(labels[:n_new], counts[:n_new], bounds[:n_new], width if end < n else 1)
        if end < n:
            least_left_out = min(least_left_out, left_out)
        n_kept[end] = len(chosen)
        for slot, index in enumerate(chosen):
            kept[end, slot], kept_counts[end, slot], parents[end, slot] = labels[index], counts[index], origins[index]
    ends = np.empty(n, dtype=np.int64)
    n_ends, end, slot = 0, n, 0
    while end > 0 and n_kept[n]:
        ends[n_ends] = end
        n_ends, end, slot = n_ends + 1, parents[end, slot, 0], parents[end, slot, 1]
    value = kept[n, 0, :, -1].sum() if n_kept[n] else best
    return value, ends[:n_ends][::-1], least_left_out
