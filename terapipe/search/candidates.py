"""The slicings a search starts from: equal, equal in time, the slicing DP's, and those that need the least memory."""

from collections.abc import Iterator

import numpy as np

from terapipe.cost import MemoryModel
from terapipe.errors import SlicingError
from terapipe.search.bound import MAX_UNITS
from terapipe.search.problem import Problem
from terapipe.search.replay import Floats, Indices, Replay

PROGRAM_UNITS = 256  # the slicing DP's answer is a start, moved on the fine grid later
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)


def slice_counts(problem: Problem) -> list[int]:
    """Numbers of slices to start from: those asked for, else a few in each doubling."""
    if problem.n_slices is not None:
        return [problem.n_slices]
    doubled = [*COUNTS]
    while doubled[-1] < problem.most_slices:
        doubled.append(2 * doubled[-1])
    return sorted({*(n for n in doubled if n <= problem.most_slices), problem.most_slices})


def uniform_start(problem: Problem, n_slices: int) -> Indices:
    """Equal slices of the grid, longer ones first."""
    cells, rest = divmod(problem.n_units, n_slices)
    return (cells + (np.arange(n_slices) < rest)) * problem.grid.granularity_tokens


def equal_time_start(problem: Problem, n_slices: int, prefix_ms: Floats) -> Indices:
    """Slices that each add as much to the time of the sequence so far; `prefix_ms` is s(l, 0) of every length."""
    rising = np.maximum.accumulate(np.where(np.isfinite(prefix_ms), prefix_ms, 0.0))
    ends = np.searchsorted(rising, rising[-1] * np.arange(1, n_slices) / n_slices) + 1
    return _on_grid(problem, ends.astype(np.float64))


def prefix_ms(problem: Problem) -> Floats:
    """Forward plus backward of the first 1, 2, … cells as one slice; 0 for those too short."""
    lengths = np.arange(1, problem.n_units + 1, dtype=np.int64) * problem.grid.granularity_tokens
    long_enough = lengths >= problem.grid.min_slice_tokens
    times = np.zeros(problem.n_units)
    times[long_enough] = problem.step_ms(lengths[long_enough], 0)
    return times


def program_starts(problem: Problem) -> Iterator[tuple[str, Indices]]:
    """The slicing DP's answers for several numbers of stages, and their names.

    M microbatches repay a short slowest slice M times less than one does: the DP of 1 + (P−1)/M
    stages weighs it alike. Numbers around that, and its doublings up to P, are asked too.
    """
    granularity = problem.coarser(PROGRAM_UNITS)
    like = 1 + (problem.n_ranks - 1) / problem.n_microbatches
    numbers = {1, int(like), int(like) + 1}
    while like < problem.n_ranks:
        like *= 2
        numbers.add(min(round(like), problem.n_ranks))
    seen = set()
    for n_stages in sorted(number for number in numbers if number <= problem.n_ranks):
        try:
            plan = problem.plan(n_stages, granularity, problem.most_slices)
        except SlicingError:  # every slicing of the coarse grid is forbidden; finer ones may not be
            return
        lengths = plan.slicing.microbatches[0].slice_tokens
        if lengths not in seen:
            seen.add(lengths)
            yield f"slicing DP, {n_stages} stages", np.array(lengths, dtype=np.int64)


def allowed_start(problem: Problem) -> Indices | None:
    """The slicing DP's answer on a fine grid, of any number of slices unless the caller set one; None where there is none.

    For costs that forbid so many slices that no other start is allowed.
    """
    try:
        plan = problem.plan(problem.n_ranks, problem.coarser(MAX_UNITS), problem.n_slices or problem.max_slices)
    except SlicingError:
        return None
    return np.array(plan.slicing.microbatches[0].slice_tokens, dtype=np.int64)


def least_memory_start(problem: Problem, replay: Replay, memory: MemoryModel) -> Indices:
    """The slicing of one number of slices whose peak is least: a linear program, rounded to the grid."""
    from scipy.optimize import linprog

    held, seq_tokens = replay.held(memory), problem.grid.seq_tokens
    n_slices = held.per_slice_token.shape[1]
    # Unknown: lengths as shares of the sequence, then the peak as a share of `most`, so that all are near 1.
    sliced, fixed = held.per_slice_token * float(seq_tokens), held.per_token * float(seq_tokens) + held.weights
    most = (sliced.max(axis=1) + fixed).max()
    below_peak = np.column_stack([sliced / most, -np.ones(len(sliced))])
    peak, total = np.eye(n_slices + 1)[-1], np.append(np.ones(n_slices), 0.0)[np.newaxis]
    bounds = [*[(problem.min_units / problem.n_units, 1.0)] * n_slices, (0.0, None)]
    found = linprog(peak, below_peak, -fixed / most, total, [1.0], bounds)
    assert found.x is not None  # equal slices are one solution
    return _on_grid(problem, np.cumsum(found.x[: n_slices - 1]) * problem.n_units)


def _on_grid(problem: Problem, ends: Floats) -> Indices:
    """Slices with ends near those given in cells, each long enough."""
    shortest, n_slices = problem.min_units, len(ends) + 1
    cells = np.rint(ends).astype(np.int64)
    for index in range(n_slices - 1):
        first = cells[index - 1] if index else 0
        cells[index] = min(max(cells[index], first + shortest), problem.n_units - (n_slices - 1 - index) * shortest)
    return np.diff(cells, prepend=0, append=problem.n_units) * problem.grid.granularity_tokens
