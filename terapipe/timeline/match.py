"""A recorded step under another schedule: which rows say how long an action takes, and how long its message."""

from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.errors import TimelineError
from terapipe.schedule import Action, Graph, Kind, Schedule
from terapipe.schedule.graph import NEIGHBOUR_STAGE
from terapipe.timeline.step import Indices, Numbers, Step

_HALVES = (Kind.I, Kind.W)
_ROUNDING = 1e-9  # of the step: shorter gaps are sums of floats that round


class Matched(NamedTuple):
    """What a recorded step says of a schedule's actions, one entry each, in the order of the schedule's graph.

    `rows` are the timeline's, with rank and kind those of the schedule. `lag_ms` is an action's own where
    its message went between the same two ranks, else the median lag of these two, else of all. `gap_ms`
    is the step's median gap, the same for all. A simulated step has no gaps but for sends that block their
    rank: there `blocks_sender` says which do, and gaps are 0.
    """

    rows: pd.DataFrame
    duration_ms: Numbers
    lag_ms: Numbers
    gap_ms: Numbers
    blocks_sender: npt.NDArray[np.bool_]


def match(step: Step, schedule: Schedule) -> Matched:
    """Match every action of a schedule with its recorded row; a B also with an I and a W.

    Raises
    ------
    TimelineError
        Where the step did not run one of the schedule's actions, ran others, or slices of other lengths; and
        for I and W of a backward that was recorded in one.
    """
    graph = schedule.graph
    recorded = {action: index for index, action in enumerate(chain(*step.graph.orders))}
    found = [_find(action, recorded) for action in chain(*graph.orders)]
    _check_same_actions(step, schedule, recorded, found)
    first = np.array([places[0] for places in found])
    rows = step.rows.iloc[first].reset_index(drop=True)
    _check_same_lengths(rows, schedule)
    kinds = [str(action.kind) for action in chain(*graph.orders)]
    # Every message of a slice has its size, whichever stage sends it.
    sizes = step.rows.groupby(["microbatch", "slice"])["n_bytes"].transform("max").to_numpy()[first]
    rows = rows.assign(rank=graph.rank, kind=kinds, n_bytes=np.where(graph.crosses, sizes, 0))
    waits = step.gap_ms[step.blocker >= 0]
    gap = float(np.median(waits)) if len(waits) and not step.is_simulated else 0.0
    durations = np.array([step.duration_ms[list(places)].sum() for places in found])
    return Matched(rows, durations, _lags(step, graph, first), np.full(graph.n_actions, gap), _blocks(step, graph))


def _find(action: Action, recorded: dict[Action, int]) -> tuple[int, ...]:
    """The row of an action, the two of a B's halves, or none."""
    if action in recorded:
        return (recorded[action],)
    halves = [action._replace(kind=kind) for kind in _HALVES]
    if action.kind is Kind.B and all(half in recorded for half in halves):
        return tuple(recorded[half] for half in halves)
    return ()


def _check_same_actions(step: Step, schedule: Schedule, recorded: dict[Action, int], found: list[tuple[int, ...]]) -> None:
    number = step.rows["step"].iloc[0]
    remedy = "A replay needs a schedule of the same stages, microbatches and slices."
    missing = [action for action, places in zip(chain(*schedule.orders), found, strict=True) if not places]
    if missing and missing[0].kind in _HALVES and missing[0]._replace(kind=Kind.B) in recorded:
        whole = missing[0]._replace(kind=Kind.B)
        raise TimelineError(
            f"the schedule runs {missing[0]}, and step {number} ran {whole}: how long either half of it "
            "takes is not recorded. Record a run under a schedule that splits backwards, or replay one that does not."
        )
    if missing:
        raise TimelineError(
            f"the schedule runs {missing[0]}, which is not in step {number}: {len(missing)} of its {len(found)} actions are "
            f"missing. {remedy}"
        )
    used = set(chain(*found))
    extra = [action for action, place in recorded.items() if place not in used]
    if extra:
        raise TimelineError(f"step {number} ran {extra[0]}, which is not in the schedule: {len(extra)} such actions. {remedy}")


def _check_same_lengths(rows: pd.DataFrame, schedule: Schedule) -> None:
    units = schedule.slicing.units[schedule.graph.unit]
    is_known = rows["slice_tokens"].notna().to_numpy()
    for name, planned in (("slice_tokens", units[:, 2]), ("n_sequences", units[:, 4])):
        other = np.flatnonzero(is_known & (rows[name].to_numpy() != planned))
        if len(other):
            at = other[0]
            raise TimelineError(
                f"{schedule.graph.action(at)} has {name}={planned[at]} in the schedule, and {rows[name].iloc[at]:g} in step "
                f"{rows['step'].iloc[at]}: its durations are those of other slices. Replay a schedule of the same slicing."
            )


def _lags(step: Step, graph: Graph, first: Indices) -> Numbers:
    """`Matched.lag_ms`; `first` is each action's row in the step."""
    producer = step.graph.dependencies[:, NEIGHBOUR_STAGE]
    receiver = np.flatnonzero((producer >= 0) & (step.graph.rank[producer] != step.graph.rank))
    sender = producer[receiver]
    target = np.full(step.graph.n_actions, -1)
    target[sender] = step.graph.rank[receiver]
    by_pair = pd.Series(step.lag_ms[sender]).groupby([step.graph.rank[sender], step.graph.rank[receiver]]).median().to_dict()
    of_all = float(np.median(step.lag_ms[sender])) if len(sender) else 0.0
    between = np.array([by_pair.get(pair, of_all) for pair in zip(graph.rank.tolist(), graph.receiver.tolist(), strict=True)])
    same = (step.graph.rank[first] == graph.rank) & (target[first] == graph.receiver)
    return np.where(graph.crosses, np.where(same, step.lag_ms[first], between), 0.0)


def _blocks(step: Step, graph: Graph) -> npt.NDArray[np.bool_]:
    """`Matched.blocks_sender`: where a send of a simulated step held its rank, and where none let it go before arriving."""
    recorded = step.graph
    sender = np.flatnonzero(recorded.crosses[:-1] & (recorded.step[1:] > 0))
    start, end = (step.rows[name].to_numpy(np.float64) for name in ("start_ms", "end_ms"))
    rounding = _ROUNDING * float(end.max() - step.begin_ms)
    holding = _pairs(recorded, sender[step.gap_ms[sender + 1] > rounding])
    if not step.is_simulated or not holding:
        return np.zeros(graph.n_actions, dtype=bool)
    let_go = _pairs(recorded, sender[start[sender + 1] < end[sender] + step.lag_ms[sender] - rounding]) - holding
    pairs = zip(graph.rank.tolist(), graph.receiver.tolist(), strict=True)
    blocks: npt.NDArray[np.bool_] = graph.crosses & np.array([pair not in let_go for pair in pairs])
    return blocks


def _pairs(graph: Graph, sender: Indices) -> set[tuple[int, int]]:
    """The ranks between which the messages of some actions go."""
    return set(zip(graph.rank[sender].tolist(), graph.receiver[sender].tolist(), strict=True))
