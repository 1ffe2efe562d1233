"""Slicings side by side under one cost model: latency, simulated step, distance to the best, and regret."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from terapipe.config import ModelConfig
from terapipe.cost import CallableCost, CostModel
from terapipe.cost.model import CostFunction, Numbers, Times
from terapipe.errors import ConfigError, CostError, ScheduleError, SlicingError, check_integer, unknown_name
from terapipe.schedule import FAMILIES, Schedule, build_schedule
from terapipe.simulator import simulate
from terapipe.slicing import (
    Objective,
    Slicing,
    SlicingPlan,
    equal_flops_slicing,
    optimal_slicing,
    pipeline_latency_ms,
    uniform_slicing,
)
from terapipe.slicing.latency import relative_gap

UNIFORM = (2, 4, 8, 16)
COST_ERROR = 0.1  # of a slice's own part and of its context part, each way
COLUMNS = [
    *("method", "slicing", "n_slices", "latency_ms", "makespan_ms", "bubble_fraction", "slowest_ms", "gap", "regret"),
    *("extrapolated", "refused"),
]


def compare_slicings(
    cost: CostModel,
    seq_tokens: int,
    n_ranks: int,
    slicings: Mapping[str, Slicing | str] | None = None,
    *,
    model: ModelConfig | None = None,
    n_microbatches: int = 1,
    schedule: str = "terapipe",
    granularity_tokens: int = 1,
    min_slice_tokens: int = 1,
    objective: Objective = "two-phase",
) -> pd.DataFrame:
    """Compare ways to cut a sequence: the slicing DP's, the usual ones, and your own.

    Parameters
    ----------
    cost : CostModel
        Of one stage, the stages being alike.
    seq_tokens, n_ranks : int
        Tokens of a sequence, and pipeline ranks.
    slicings : {name: Slicing or str}, optional
        Added to "optimal" (the slicing DP's: the best on the grid of `granularity_tokens`; others
        need not lie on it, so that their gap may be negative), "whole", "uniform 2", 4, 8 and 16 as
        far as there are tokens, and with a `model` "equal FLOPs" in as many slices as the DP's; one
        of those names replaces it. Of one sequence; every microbatch is cut like that.
    model : ModelConfig, optional
        Whose FLOPs "equal FLOPs" counts.
    n_microbatches : int
        Microbatches in a step, of one sequence each.
    schedule : str
        Family that makespan_ms is simulated with, of one stage a rank, as `cost` is of one stage.
    granularity_tokens, min_slice_tokens, objective
        Of the slicing DP; see `optimal_slicing`.

    Returns
    -------
    DataFrame
        One row a slicing: method, slicing (of the step), n_slices (of a microbatch).
        Of ONE microbatch, what the slicing DP minimises: latency_ms (`pipeline_latency_ms`),
        slowest_ms (slowest slice, forward + backward), gap (latency ÷ the DP's lower bound − 1) and
        regret: the worst gap if the truth is 10 % off, the own part t(l, 0) and the context part
        t(l, c) − t(l, 0) each up or down.
        Of the step, simulated with `schedule`: makespan_ms, bubble_fraction.
        extrapolated: whether a slice of it has a cost beyond what was measured. refused: "", or why
        numbers are NaN: a slice below `min_slice_tokens` or one that the cost cannot answer for
        (all of them), or a slicing that the schedule's family cannot run (those of the step).

    Raises
    ------
    SlicingError, CostError, ConfigError
        For sizes that do not fit, what is no cost, slicing or model, slicings of another step, or
        where "optimal" has no answer.
    ScheduleError
        For an unknown family, or one of more stages a rank.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost = tp.CallableCost(lambda l, c, b: b * (8 + l * (1 + c / 64)), lambda l, c, b: 2 * b * (8 + l * (1 + c / 64)))
    >>> table = tp.compare_slicings(cost, 128, 8).set_index("method")
    >>> {method: round(gap, 2) for method, gap in table["gap"].items()}
    {'optimal': 0.0, 'whole': 1.0, 'uniform 2': 1.14, 'uniform 4': 0.61, 'uniform 8': 0.23, 'uniform 16': 0.09}
    """
    _check_types(cost, slicings, model)
    _check_family(schedule)
    setting = _Setting(seq_tokens, n_ranks, n_microbatches, granularity_tokens, min_slice_tokens, objective)
    given = {name: setting.read(name, slicing) for name, slicing in (slicings or {}).items()}
    plan = setting.plan(cost)
    truths = [_mistaken(cost, own, context) for own, context in product((1 - COST_ERROR, 1 + COST_ERROR), repeat=2)]
    bounds_ms = [plan.lower_bound_ms, *(setting.plan(truth).lower_bound_ms for truth in truths)]
    rows = []
    for method, slicing in (_usual_slicings(setting, plan.slicing, model) | given).items():
        step = Slicing(slicing.microbatches * n_microbatches)
        row: dict[str, Any] = {
            "method": method,
            "slicing": str(step),
            "n_slices": len(slicing.units),
            "extrapolated": False,
            "refused": "",
        }
        try:
            row |= setting.numbers(slicing, [cost, *truths], bounds_ms)
            row |= _simulated(build_schedule(schedule, n_ranks, step), cost, row["slowest_ms"])
        except (CostError, SlicingError, ScheduleError) as refused:
            if slicing is plan.slicing and not isinstance(refused, ScheduleError):
                raise
            row["refused"] = str(refused)
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def _check_types(cost: object, slicings: object, model: object) -> None:
    if not isinstance(cost, CostModel):
        raise CostError(f"cost={cost!r}: needs one CostModel, of one stage; the stages are alike.")
    if not isinstance(slicings, Mapping | None):
        raise SlicingError(f"slicings={slicings!r}: needs {{name: Slicing or notation}}, e.g. {{'mine': '[(1, [512, 512])]'}}.")
    if not isinstance(model, ModelConfig | None):
        raise ConfigError(f"model={model!r}: needs a ModelConfig, e.g. ModelConfig.preset('tour').")


def _check_family(name: object) -> None:
    if not isinstance(name, str) or name not in FAMILIES:
        raise ScheduleError(unknown_name("schedule", name, FAMILIES))
    chunks = FAMILIES[name].chunks
    if chunks != 1:
        raise ScheduleError(
            f"schedule={name!r}: {name} places {chunks} stages on each rank, and cost is of one stage, so that its step would "
            f"be that of {chunks} times as many layers. Use a family of 1 stage a rank, such as 'seq1f1b', or tp.best_schedule."
        )


@dataclass(frozen=True)
class _Setting:
    """What all slicings of a comparison share."""

    seq_tokens: int
    n_ranks: int
    n_microbatches: int
    granularity_tokens: int
    min_slice_tokens: int
    objective: Objective

    def __post_init__(self) -> None:
        check_integer("n_microbatches", self.n_microbatches, 1, SlicingError)

    def plan(self, cost: CostModel) -> SlicingPlan:
        """The slicing DP's answer for one microbatch."""
        return optimal_slicing(
            cost,
            self.seq_tokens,
            self.n_ranks,
            granularity_tokens=self.granularity_tokens,
            min_slice_tokens=self.min_slice_tokens,
            objective=self.objective,
        )

    def read(self, name: str, given: Slicing | str) -> Slicing:
        """One microbatch of a slicing to compare; refused where it does not cut the same sequence."""
        slicing = Slicing.parse(given) if isinstance(given, str) else given
        if not isinstance(slicing, Slicing):
            raise SlicingError(f"slicings[{name!r}]={given!r}: needs a Slicing, or its notation like '[(1, [512, 512])]'.")
        first = slicing.microbatches[0]
        alike = set(slicing.microbatches) == {first} and slicing.n_microbatches in (1, self.n_microbatches)
        if not alike or first.n_sequences != 1 or slicing.seq_tokens != self.seq_tokens:
            raise SlicingError(
                f"slicings[{name!r}]={slicing}: needs {self.seq_tokens} tokens in one microbatch of one sequence (or in "
                f"n_microbatches={self.n_microbatches} alike), as all that are compared cut the same step."
            )
        return Slicing((first,))

    def numbers(self, slicing: Slicing, costs: Sequence[CostModel], bounds_ms: Sequence[float]) -> dict[str, Any]:
        """What a row says of one microbatch; `costs` and `bounds_ms` begin with the cost model's own, then each truth's."""
        units = slicing.units[:, 2:].T
        shortest = int(units[0].min())
        if shortest < self.min_slice_tokens:
            raise SlicingError(f"a slice of {shortest} tokens is shorter than min_slice_tokens={self.min_slice_tokens}.")
        latencies = [pipeline_latency_ms(slicing, each, self.n_ranks, self.objective) for each in costs]
        gap, *regrets = map(relative_gap, latencies, bounds_ms)
        return {
            "latency_ms": latencies[0],
            "slowest_ms": float(np.max(costs[0].step_ms(*units))),
            "gap": gap,
            "regret": max(regrets),
            "extrapolated": bool(np.any(costs[0].is_extrapolated(*units))),
        }


def _usual_slicings(setting: _Setting, optimal: Slicing, model: ModelConfig | None) -> dict[str, Slicing]:
    chosen = {"optimal": optimal, "whole": uniform_slicing(setting.seq_tokens, 1)}
    for n_slices in UNIFORM:
        if n_slices <= setting.seq_tokens:
            chosen[f"uniform {n_slices}"] = uniform_slicing(setting.seq_tokens, n_slices)
    if model is not None:
        chosen["equal FLOPs"] = equal_flops_slicing(model, setting.seq_tokens, optimal.microbatches[0].n_slices)
    return chosen


def _mistaken(cost: CostModel, own_factor: float, context_factor: float) -> CostModel:
    """The truth, if the cost model has both parts of a slice's time wrong by a factor."""

    def scaled(function: Callable[[Numbers, Numbers, Numbers], Times]) -> CostFunction:
        def times(lengths: Numbers, contexts: Numbers, sequences: Numbers) -> Times:
            whole = np.asarray(function(lengths, contexts, sequences))
            alone = np.asarray(function(lengths, np.zeros_like(contexts), sequences))
            allowed = np.isfinite(whole)
            own = np.where(np.isfinite(alone), alone, whole)  # forbidden alone: nothing tells its parts apart
            context = np.subtract(whole, own, out=np.zeros(whole.shape), where=allowed)
            return np.where(allowed, np.maximum(own_factor * own + context_factor * context, 0.0), np.inf)

        return times

    return CallableCost(scaled(cost.forward_ms), scaled(cost.backward_ms))


def _simulated(schedule: Schedule, cost: CostModel, slowest_ms: float) -> dict[str, float]:
    if np.isinf(slowest_ms):  # a forbidden slice, which the simulator refuses
        return {"makespan_ms": np.inf}
    timeline = simulate(schedule, cost)
    return {"makespan_ms": timeline.makespan_ms, "bubble_fraction": timeline.bubble_fraction}
