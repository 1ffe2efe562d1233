"""A step time that no slicing goes below, in any order of F and B with stage r on rank r.

On the last rank the first action is the forward of a slice 0, which has passed P−1 earlier ranks;
after its last, the backward of a slice 0, P−1 ranks remain. In between the rank runs all its own
actions. For microbatches cut alike, with s = f + b:

    step ≥ M·Σ s + (P−1)·s(slice 0)                             any order
    step = M·Σ s + (P−1)·(max f + max b)                        all forwards before all backwards

The least of the first over all slicings of the grid is one dynamic program, of the second what the
slicing DP solves. Both hold for any cost.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from terapipe.errors import SlicingError
from terapipe.search.problem import Problem
from terapipe.search.replay import Indices
from terapipe.slicing.tables import slice_costs

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
    lengths = np.arange(problem.min_units, problem.n_units + 1, dtype=np.int64) * problem.grid.granularity_tokens
    shortest = problem.step_ms(lengths, 0).min()
    bound = problem.n_microbatches * whole + (problem.n_ranks - 1) * float(shortest)
    return Bound(bound, f"costs where cutting a slice saves no time (none of a grid of {granularity} tokens does)")


def least_sum_ms(problem: Problem, granularity: int, n_sums: int, n_firsts: int, n_slices: int | None = None) -> float:
    """min over the grid's slicings of n_sums·Σ s + n_firsts·s(slice 0); of exactly `n_slices` slices, if given."""
    from terapipe.slicing.program import least_later, least_sums  # numba loads only where it is needed

    grid = replace(problem.grid, granularity_tokens=granularity)
    n = grid.n_units
    try:
        step_ms = slice_costs([problem.cost], grid, [1])[0, :, 0].sum(axis=0)
    except SlicingError:  # every slice is forbidden
        return np.inf
    summed = n_sums * step_ms
    if n_firsts:  # 0 × a forbidden slice is not 0
        summed[:n] += n_firsts * step_ms[:n]
    unlimited = summed[np.newaxis], least_later(summed, n)[np.newaxis], np.array([np.inf])
    return float(least_sums(summed, *unlimited, n, n_slices or 0)[-1, n])


def _forwards_first(problem: Problem) -> tuple[float, Indices | None]:
    """(M−1)·min Σ s plus the least two-phase latency of one microbatch, no more than the least of their sum; and its slices."""
    try:
        plan = problem.plan(problem.n_ranks, problem.grid.granularity_tokens, problem.n_slices)
    except SlicingError:
        return np.inf, None
    rest = least_sum_ms(problem, problem.grid.granularity_tokens, 1, 0) if problem.n_microbatches > 1 else 0.0
    bound = (problem.n_microbatches - 1) * rest + plan.lower_bound_ms
    return bound, np.array(plan.slicing.microbatches[0].slice_tokens, dtype=np.int64)
