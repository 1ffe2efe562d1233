"""Pipeline latency of a slicing, in closed form: what the slicing DPs minimise. Knows no schedules."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from terapipe.cost import CostModel, as_times
from terapipe.errors import SlicingError, check_integer, unknown_name
from terapipe.slicing.value import Slicing

Objective = Literal["paper", "two-phase"]


def pipeline_latency_ms(
    slicing: Slicing, cost: CostModel | Sequence[CostModel], n_stages: int, objective: Objective = "two-phase"
) -> float:
    """Milliseconds of one step, all forwards then all backwards, messages free.

    Parameters
    ----------
    slicing : Slicing
        Every slice of every microbatch counts.
    cost : CostModel or list of CostModel
        Of one stage, all stages being alike; or one for each stage.
    n_stages : int
        K of the paper.
    objective : "two-phase" or "paper"
        "paper": eq. (5) of TeraPipe (ICML 2021), Σ t + (K−1)·max t with t = forward + backward.
        "two-phase": Σ(f+b) + (K−1)·(max f + max b), what such a pipeline really takes.
        Where stages differ, the longest path through the grid of slices × stages, of t in the
        first case, of f and of b in the second: on equal stages that is the formula above.

    Raises
    ------
    SlicingError, CostError
        For an unknown objective, no stages, or costs that are not one or one a stage.
    """
    check_objective(objective)
    costs = stage_costs(cost, n_stages)
    _, _, lengths, contexts, sequences = slicing.units.T
    phases = [each.forward_ms for each in costs], [each.backward_ms for each in costs]
    forward, backward = (
        np.stack([as_times(function(lengths, contexts, sequences), lengths, contexts, sequences) for function in functions])
        for functions in phases
    )
    parts = [forward + backward] if objective == "paper" else [forward, backward]
    if isinstance(cost, CostModel):
        waiting = (n_stages - 1) * sum(part.max() for part in parts) if n_stages > 1 else 0.0  # 0 × inf is not 0
        return float((forward + backward).sum() + waiting)
    if not np.isfinite(forward + backward).all():
        return float("inf")
    from terapipe.slicing.paths import longest_path  # numba loads only where it is needed

    return float(sum(longest_path(part) for part in parts))


def check_objective(objective: str) -> None:
    """Refuse an unknown objective."""
    if objective not in get_args(Objective):
        raise SlicingError(unknown_name("objective", objective, get_args(Objective)))


def stage_costs(cost: CostModel | Sequence[CostModel], n_stages: int) -> list[CostModel]:
    """The cost models given: one for all stages, or one for each."""
    check_integer("n_stages", n_stages, 1, SlicingError)
    costs = [cost] if isinstance(cost, CostModel) else list(cost) if isinstance(cost, Sequence) else []
    if not costs or not all(isinstance(each, CostModel) for each in costs):
        raise SlicingError(f"cost={cost!r}: needs a CostModel, or a list with one for each stage.")
    if not isinstance(cost, CostModel) and len(costs) != n_stages:
        raise SlicingError(f"{len(costs)} cost models for {n_stages} stages; give one for all, or one for each.")
    return costs


def relative_gap(time_ms: float, bound_ms: float) -> float:
    """A time ÷ a bound − 1: nothing is better by more. 0 where both are 0; NaN without a bound."""
    if bound_ms == 0:
        return 0.0 if time_ms == 0 else float("inf")
    return time_ms / bound_ms - 1


def distinct(costs: Sequence[CostModel]) -> list[CostModel]:
    """The different cost models among those given; equal ones stand for each other."""
    found: list[CostModel] = []
    for cost in costs:
        if cost not in found:
            found.append(cost)
    return found
