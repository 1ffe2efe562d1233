"""Where the ranks' time went: a step replayed without one cause of lost time after the other.

Each world replays the step on the timeline's own durations (`timeline.step`), and lacks one cause more
than the world before it. What that saves, times the ranks, is the cause's part, so that the parts add up
to n_ranks × makespan whatever the timeline. A part holds what its cause cost all ranks, the waiting that
it made included. In the order of removal:

    unexplained       the step itself, minus its replay: starts before their inputs, clocks that differ,
                      ranks without a row; 0 for what was simulated
    runtime           from when an action had its rank and its inputs until it started
    communication     until messages were there; in a simulation also while sends block their rank
    contention        ranks slowing each other: every action takes what it takes alone
    slicing_overhead  a microbatch's slices taking longer than it would whole: each keeps its share of that
    dependency        slices and stages that differ (every action takes the mean of its kind), and what is
                      then still idle between a rank's actions
    fill, drain       in that last world, before a rank's first action and after its last
    useful            in that last world, the actions themselves
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from terapipe.errors import CostError
from terapipe.timeline.compute import Costs, alone_ms, check_contention, whole_ratio
from terapipe.timeline.step import Numbers, Step

if TYPE_CHECKING:
    from terapipe.timeline.timeline import Timeline

BUDGET = (
    *("compute", "useful", "slicing_overhead", "contention"),
    *("communication", "dependency", "fill", "drain", "runtime", "unexplained"),
)


def find_budget(timeline: "Timeline", cost: Costs | None, contention: float | None) -> pd.Series:
    """`Timeline.budget`: shares are means over measured steps, times n_ranks × the median makespan."""
    if contention is not None:
        check_contention(contention)  # also where a simulation knows better
    rows = timeline.measured
    alone = _alone(timeline, rows, contention)
    ratio = _ratio(timeline, rows, cost)
    shares = [_shares(step, timeline.n_ranks, alone, ratio) for _, step in rows.groupby("step")]
    mean = pd.DataFrame(shares).mean()
    names = [name for name in BUDGET if name in mean]
    budget: pd.Series = (mean[names] * timeline.n_ranks * timeline.makespan_ms).rename("rank_ms")
    return budget


def _alone(timeline: "Timeline", rows: pd.DataFrame, contention: float | None) -> "pd.Series[float] | None":
    if timeline.alone_ms is not None:
        return pd.Series(timeline.alone_ms, index=timeline.frame.index)[rows.index]
    return None if contention is None else alone_ms(rows, contention)


def _ratio(timeline: "Timeline", rows: pd.DataFrame, cost: Costs | None) -> "pd.Series[float] | None":
    if timeline.cost is None:
        return None if cost is None else whole_ratio(rows, cost)
    try:
        return whole_ratio(rows, timeline.cost)
    except CostError:  # the simulated cost knows the slices, and not the whole: the split was not asked for
        return None


class _World(NamedTuple):
    """A replay, and what it replayed."""

    duration_ms: Numbers
    makespan_ms: float
    start_ms: Numbers
    end_ms: Numbers


def _shares(
    rows: pd.DataFrame, n_ranks: int, alone: "pd.Series[float] | None", ratio: "pd.Series[float] | None"
) -> dict[str, float]:
    """The parts of one step ÷ (n_ranks × its makespan)."""
    step = Step.read(rows)
    makespan = float(rows["end_ms"].max() - rows["start_ms"].min())
    present = step.graph.rank[-1] + 1
    parts: dict[str, float] = {"unexplained": (n_ranks - present) * makespan}
    before = makespan
    for name, world in _worlds(step, alone, ratio):
        parts[name] = parts.get(name, 0.0) + present * (before - world.makespan_ms)
        before = world.makespan_ms
    by_rank = pd.DataFrame({"start": world.start_ms, "end": world.end_ms}).groupby(step.graph.rank)
    busy = float(world.duration_ms.sum())
    parts["useful" if alone is not None and ratio is not None else "compute"] = busy
    parts["fill"] = float(by_rank["start"].min().sum())
    parts["drain"] = float((world.makespan_ms - by_rank["end"].max()).sum())
    parts["dependency"] += present * world.makespan_ms - busy - parts["fill"] - parts["drain"]
    return {name: part / (n_ranks * makespan) if makespan > 0 else 0.0 for name, part in parts.items()}


def _worlds(step: Step, alone: "pd.Series[float] | None", ratio: "pd.Series[float] | None") -> Iterator[tuple[str, _World]]:
    """The worlds in the order of removal, each with the name of what it lacks beyond the one before."""
    lags, gaps = step.lag_ms, step.gap_ms
    durations: Numbers = step.duration_ms
    nothing = np.zeros_like(durations)
    blocking = gaps if step.is_simulated else nothing  # a modelled rank waits for nothing but its own sends
    yield "unexplained", _replay(step, durations, lags, gaps)
    yield "runtime", _replay(step, durations, lags, blocking)
    yield "communication", _replay(step, durations, nothing, nothing)
    if alone is not None:
        durations = np.asarray(alone[step.rows.index], dtype=np.float64)
        yield "contention", _replay(step, durations, nothing, nothing)
    if ratio is not None:
        durations = np.multiply(durations, ratio[step.rows.index])
        yield "slicing_overhead", _replay(step, durations, nothing, nothing)
    _, of_kind = np.unique(step.graph.kind, return_inverse=True)
    means = np.bincount(of_kind, durations) / np.bincount(of_kind)
    yield "dependency", _replay(step, means[of_kind], nothing, nothing)


def _replay(step: Step, durations: Numbers, lags: Numbers, gaps: Numbers) -> _World:
    starts = step.run(durations, lags, gaps)
    return _World(durations, float(starts.end_ms.max()), starts.start_ms, starts.end_ms)
