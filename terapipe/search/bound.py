"""A step time that no slicing goes below, in any order of F and B with stage r on rank r.

On the last rank the first action is the forward of a slice 0, which has passed P−1 earlier ranks;
after its last, the backward of a slice 0, P−1 ranks remain. In between the rank runs all its own
actions. For microbatches cut alike, with s = f + b:

    step ≥ M·Σ s + (P−1)·s(slice 0)                             any order
    step = M·Σ s + (P−1)·(max f + max b)                        all forwards before all backwards

The least of the first over all slicings of the grid is one dynamic program, of the second what the
slicing DP solves. Both hold for any cost.
"""

from typing import NamedTuple

import numpy as np

from terapipe.errors import SlicingError
from terapipe.search.problem import Problem
from terapipe.search.replay import Indices

MAX_UNITS = 2048  # cells of the finest grid for which every slice is looked at
CHECKED_UNITS = 1024
ROUNDING = 1e-12  # relative: sums of the same slices in another order differ by less


class Bound(NamedTuple):
    """A lower bound in ms, and the costs for which it is proven; NaN and "" where there is none.

    `lengths` is the slicing DP's slicing where it was asked: of one microbatch it meets the bound.
    """

    lower_bound_ms: float
    holds_for: str
    lengths: Indices | None = None


def bound_step(problem: Problem) -> Bound:
    """The best bound known; infinite where every slicing is forbidden.

    On a grid of at most `MAX_UNITS` cells it holds for any cost. Beyond, every slice of the grid is
    too many to look at: the bound is M·s(whole) + (P−1)·min s(l, 0), which holds where cutting a
    slice in two saves no time. Whether any slicing of a coarser grid saves time is looked at, and
    if one does there is no bound.
    """
    if problem.n_units <= MAX_UNITS:
        bound = least_sum_ms(
            problem, problem.grid.granularity_tokens, problem.n_microbatches, problem.n_ranks - 1, problem.n_slices
        )
        if problem.n_microbatches > 1 and problem.family != "terapipe":
            return Bound(bound, "any cost")
        # All forwards come first; of one microbatch in any order.
        other, lengths = _forwards_first(problem)
        return Bound(max(bound, other), "any cost", lengths)
    granularity = problem.coarser(CHECKED_UNITS)
    whole = float(problem.step_ms(np.array([problem.grid.seq_tokens]), 0)[0])
    if least_sum_ms(problem, granularity, 1, 0) < whole * (1 - ROUNDING):
        return Bound(np.nan, "")
    shortest = problem.step_ms(_lengths(problem, problem.grid.granularity_tokens, problem.n_units), 0).min()
    bound = problem.n_microbatches * whole + (problem.n_ranks - 1) * float(shortest)
    return Bound(bound, f"costs where cutting a slice saves no time (none of a grid of {granularity} tokens does)")


def relative_gap(time_ms: float, bound_ms: float) -> float:
    """A time ÷ a bound − 1: nothing is better by more. 0 where both are 0; NaN without a bound."""
    if bound_ms == 0:
        return 0.0 if time_ms == 0 else np.inf
    return time_ms / bound_ms - 1


def least_sum_ms(problem: Problem, granularity: int, n_sums: int, n_firsts: int, n_slices: int | None = None) -> float:
    """min over the grid's slicings of n_sums·Σ s + n_firsts·s(slice 0); of exactly `n_slices` slices, if given.

    O(n²) slices, a row of slices that begin at one place at a time; by the number of slices too if that is given.
    """
    n = problem.grid.seq_tokens // granularity
    least = np.full((1 if n_slices is None else n_slices + 1, n + 1), np.inf)
    least[0, 0] = 0.0
    before, after = (least, least) if n_slices is None else (least[:-1], least[1:])
    for start in range(n):
        if not np.isfinite(before[:, start]).any():
            continue
        lengths = _lengths(problem, granularity, n - start)
        skipped = n - start - len(lengths)  # shorter than the shortest slice
        weight = n_sums + (n_firsts if start == 0 else 0)
        reached = before[:, start, np.newaxis] + weight * problem.step_ms(lengths, start * granularity)
        ends = after[:, start + 1 + skipped :]
        np.minimum(ends, reached, out=ends)
    return float(least[-1, n])


def _lengths(problem: Problem, granularity: int, n: int) -> Indices:
    """Lengths of up to n cells that are long enough."""
    lengths = np.arange(1, n + 1, dtype=np.int64) * granularity
    return lengths[lengths >= problem.grid.min_slice_tokens]


def _forwards_first(problem: Problem) -> tuple[float, Indices | None]:
    """(M−1)·min Σ s plus the least two-phase latency of one microbatch, no more than the least of their sum; and its slices."""
    try:
        plan = problem.plan(problem.n_ranks, problem.grid.granularity_tokens, problem.n_slices)
    except SlicingError:
        return np.inf, None
    rest = least_sum_ms(problem, problem.grid.granularity_tokens, 1, 0) if problem.n_microbatches > 1 else 0.0
    bound = (problem.n_microbatches - 1) * rest + plan.lower_bound_ms
    return bound, np.array(plan.slicing.microbatches[0].slice_tokens, dtype=np.int64)
