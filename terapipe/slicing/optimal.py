"""Optimal slicings: from the cost of one stage, or of each, to the batch's microbatches and slices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from terapipe.cost import CostModel
from terapipe.errors import SlicingError, check_integer
from terapipe.slicing.latency import Objective, check_objective, distinct, relative_gap, stage_costs
from terapipe.slicing.tables import Grid, is_extrapolated, slice_costs
from terapipe.slicing.value import MicrobatchSlices, Slicing


@dataclass(frozen=True)
class SlicingPlan:
    """A slicing with the latency that it was chosen for.

    Attributes
    ----------
    slicing : Slicing
        The best slicing found; the exact best where `lower_bound_ms` equals `latency_ms`.
    latency_ms, lower_bound_ms : float
        Its latency by `objective`, and a proven bound that no slicing goes below.
    t_max_ms : float
        Its slowest slice as the latency counts it: max t, or max f + max b for "two-phase"; on the
        slowest stage where stages differ.
    n_programs : int
        Dynamic programs solved.
    objective : str
    n_stages : int
    extrapolated : bool
        Whether a slice that it was chosen among has a cost beyond what was measured (see
        `CostModel.is_extrapolated`).
    """

    slicing: Slicing
    latency_ms: float
    lower_bound_ms: float
    t_max_ms: float
    n_programs: int
    objective: Objective
    n_stages: int
    extrapolated: bool = False

    @property
    def gap(self) -> float:
        """Latency ÷ lower bound − 1: 0 where the slicing is proven to be the best."""
        return relative_gap(self.latency_ms, self.lower_bound_ms)


def optimal_slicing(
    cost: CostModel | Sequence[CostModel],
    seq_tokens: int,
    n_stages: int,
    batch_sequences: int = 1,
    granularity_tokens: int = 1,
    objective: Objective = "two-phase",
    max_slices: int | None = None,
    min_slice_tokens: int = 1,
) -> SlicingPlan:
    """Split a batch into microbatches and their sequences into slices, with the least pipeline latency.

    Exact on equal stages, for any cost: neither forward nor backward need rise with slice length,
    context or sequences, and an infinite cost forbids a slice. Where stages differ the answer comes
    with a proven lower bound, equal to it where the search was complete. One dynamic program takes
    O(batch_sequences · (seq_tokens/granularity_tokens)²) time and memory, some tens of them find the
    optimum; with `max_slices` each takes up to that many times longer.

    Parameters
    ----------
    cost : CostModel or list of CostModel
        Of one stage, all being alike; or one for each stage. With `batch_sequences` it is asked for
        microbatches of 1 … batch_sequences sequences.
    seq_tokens, n_stages : int
        L and K of the paper.
    batch_sequences : int
        B: sequences of a step. Microbatch sizes and their slices are chosen together (section 3.4 of
        TeraPipe), with one slowest slice for all.
    granularity_tokens : int
        Slice lengths are multiples of it; it must divide `seq_tokens`.
    objective : "two-phase" or "paper"
        See `pipeline_latency_ms`.
    max_slices : int, optional
        Most slices in a microbatch.
    min_slice_tokens : int
        No slice is shorter.

    Raises
    ------
    SlicingError
        For sizes that do not fit, or where every slicing is forbidden.
    CostError
        For a NaN or negative cost, or a question the cost model cannot answer.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost = tp.CallableCost(lambda l, c, b: b * (8 + l * (1 + c / 64)), lambda l, c, b: 2 * b * (8 + l * (1 + c / 64)))
    >>> str(tp.optimal_slicing(cost, 128, 8).slicing)
    '[(1, [19, 15, 12, 11, 10, 9, 9, 8, 8] + [7] * 3 + [6])]'
    """
    check_objective(objective)
    costs = stage_costs(cost, n_stages)
    check_integer("batch_sequences", batch_sequences, 1, SlicingError)
    if max_slices is not None:
        check_integer("max_slices", max_slices, 1, SlicingError)
    grid = Grid(seq_tokens, granularity_tokens, min_slice_tokens)
    if len(distinct(costs)) == 1:
        return _equal_stages(costs[0], grid, n_stages, batch_sequences, objective, max_slices)
    from terapipe.slicing.unlike import search_unlike_stages

    return search_unlike_stages(costs, grid, batch_sequences, objective, max_slices)


def _equal_stages(
    cost: CostModel, grid: Grid, n_stages: int, batch_sequences: int, objective: Objective, max_slices: int | None
) -> SlicingPlan:
    # numba is imported here: planning is the only work that needs it.
    from terapipe.slicing.boxes import Program, search_boxes

    sizes = range(1, batch_sequences + 1)
    (times,) = slice_costs([cost], grid, sizes)
    summed = times.sum(axis=0)
    limited = summed[np.newaxis] if objective == "paper" else times
    program = Program(summed, limited, n_stages - 1, grid.n_units, batch_sequences, max_slices or 0)
    found = search_boxes(program)
    slicing = Slicing(tuple(MicrobatchSlices(size, grid.lengths(ends)) for size, ends in found.cut))
    return SlicingPlan(
        slicing=slicing,
        latency_ms=found.latency,
        lower_bound_ms=found.latency,
        t_max_ms=found.slowest,
        n_programs=found.n_programs,
        objective=objective,
        n_stages=n_stages,
        extrapolated=is_extrapolated([cost], grid, sizes),
    )
