"""One step of a timeline as a schedule that ran: what every action waited for, and the same step with other times.

An action starts once the one before it on its rank has ended, its inputs are there (an input from another
rank a message's lag after its producer's end), and a gap has passed that the table does not explain: the
runtime's doing, or in a simulation a send that blocks its rank. `Step.run` replays the step through
`schedule.starts` with any of the three changed. Knows no costs and no links.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.schedule import Action, Graph, Kind, Starts, Transfers, earliest_starts
from terapipe.schedule.graph import KINDS, NEIGHBOUR_STAGE
from terapipe.slicing import MicrobatchSlices, Slicing
from terapipe.timeline.inputs import input_rows
from terapipe.timeline.sources import MODELLED, REPLAYED, SIMULATED

Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
# Their `ready_ms` is when the input was there. Of what really ran it is when the rank had it in hand, and a
# rank looks only when it needs it.
_KNOWS_ARRIVALS = (SIMULATED, REPLAYED)


@dataclass(frozen=True, eq=False)
class Step:
    """Arrays have one entry an action, in the order of `rows` and of the graph.

    Attributes
    ----------
    rows : DataFrame
        The step's rows of the timeline, by rank and start.
    place : integer array
        Where each row stood in the table given.
    graph : Graph
        Who waits for whom. Ranks are numbered 0…n−1; lengths of slices stand in, as only order counts.
    begin_ms, duration_ms : float, array
        First start; how long each action took.
    release_ms : array
        How long after `begin_ms` a rank starts whose first action has no input in the table.
    lag_ms : array
        From an action's end until its message is there; 0 where its output stays on its rank. Measured
        only where the receiver was free and waiting; else no more than the median lag of those messages
        between the same two ranks, or than the smallest bound where none was waited for.
    gap_ms : array
        Between the last of what an action waited for and its start.
    blocker : integer array
        The action that each one waited for last, −1 for none; of an input and the rank's own action
        before it that ended at once, the input.
    """

    rows: pd.DataFrame
    place: Indices
    graph: Graph
    begin_ms: float
    duration_ms: Numbers
    release_ms: Numbers
    lag_ms: Numbers
    gap_ms: Numbers
    blocker: Indices

    @classmethod
    def read(cls, rows: pd.DataFrame) -> "Step":
        """The rows of one step; any of its actions may be missing.

        Hand-overs between ranks other than from stage to stage are not seen. Where no order of starts
        allows all dependencies, those that the times contradict are left out.

        Raises
        ------
        TimelineError
            Where an action is there twice.
        """
        keys = [rows[name].to_numpy(np.float64) for name in ("end_ms", "start_ms", "rank")]
        place = np.lexsort((np.arange(len(rows)), *keys)).astype(np.int64)
        rows = rows.iloc[place]
        start, end = (rows[name].to_numpy(np.float64) for name in ("start_ms", "end_ms"))
        graph = _possible(_read_graph(rows), start, end)
        begin = float(start.min())
        first = graph.step == 0
        free = np.where(first, -np.inf, np.roll(end, 1))
        lag = _lags(graph, rows, free)
        blocker, latest = _latest(graph, end, lag, free)
        if _all_from(rows, *MODELLED):  # a modelled rank that has its inputs waits for its own sends only
            sends = ~first & (start > rows["ready_ms"].to_numpy(np.float64))
            blocker = np.where(sends, np.arange(len(rows)) - 1, blocker)
        alone = ~np.isfinite(latest)
        gap = np.where(alone, 0.0, np.maximum(start - np.where(alone, 0.0, latest), 0.0))
        release = np.where(alone, start - begin, 0.0)
        return cls(rows, place, graph, begin, end - start, release, lag, gap, blocker)

    @property
    def is_simulated(self) -> bool:
        """Whether its times are the simulator's own, also replayed, which leave no gap but for sends that block."""
        return _all_from(self.rows, *MODELLED)

    def run(self, duration_ms: Numbers, lag_ms: Numbers, gap_ms: Numbers) -> Starts:
        """The step with other times, from 0 on: every action as early as its order, inputs and gap allow."""
        before = self.release_ms + gap_ms
        free = np.zeros(len(before))
        transfers = Transfers(free, lag_ms, free.astype(bool))
        starts = earliest_starts(self.graph, before + duration_ms, transfers)
        return starts._replace(start_ms=starts.start_ms + before)


def _all_from(rows: pd.DataFrame, *sources: str) -> bool:
    return bool(rows["source"].str.startswith(sources).all())


def _read_graph(rows: pd.DataFrame) -> Graph:
    """The graph of a table; its slicing has the right numbers of slices, and invented lengths."""
    ranks, rank = np.unique(rows["rank"].to_numpy(), return_inverse=True)
    stage, microbatch, place = (rows[name].to_numpy(np.int64) for name in ("stage", "microbatch", "slice"))
    bounds = np.searchsorted(rank, np.arange(len(ranks) + 1))
    homes = np.zeros(stage.max() + 1, dtype=np.int64)
    homes[stage] = rank
    kind = np.asarray(rows["kind"].map({kind.value: code for code, kind in enumerate(KINDS)}), dtype=np.int64)
    columns = zip(stage.tolist(), rows["kind"], microbatch.tolist(), place.tolist(), strict=True)
    actions = [Action(at, Kind(letter), *unit) for at, letter, *unit in columns]
    n_slices = np.ones(microbatch.max() + 1, dtype=np.int64)
    np.maximum.at(n_slices, microbatch, place + 1)
    most = int(n_slices.max())
    slicing = Slicing(tuple(MicrobatchSlices(1, (1,) * (n - 1) + (most - n + 1,)) for n in n_slices.tolist()))
    inputs = np.column_stack(input_rows(rows))
    # A message goes from stage to stage: a stage on two ranks is no schedule's.
    elsewhere = (inputs >= 0) & (rank[inputs] != rank[:, None])
    elsewhere[:, NEIGHBOUR_STAGE] = False
    return Graph(
        orders=tuple(tuple(actions[low:high]) for low, high in pairwise(bounds.tolist())),
        slicing=slicing,
        stage_to_rank=tuple(homes.tolist()),
        rank=rank.astype(np.int64),
        step=np.arange(len(rank)) - bounds[rank],
        kind=kind,
        stage=stage,
        unit=np.array(slicing.first_units)[microbatch] + place,
        dependencies=np.where(elsewhere, -1, inputs),
    )


def _possible(graph: Graph, start: Numbers, end: Numbers) -> Graph:
    """The graph itself if its orders can run, else without the dependencies that the times contradict."""
    if (earliest_starts(graph, np.ones(graph.n_actions)).end_ms > 0).all():
        return graph
    turn = np.empty(graph.n_actions, dtype=np.int64)
    turn[np.lexsort((np.arange(graph.n_actions), end, start))] = np.arange(graph.n_actions)
    needed = graph.dependencies
    kept = (needed >= 0) & (end[needed] <= start[:, None]) & (turn[needed] < turn[:, None])
    return replace(graph, dependencies=np.where(kept, needed, -1))


def _lags(graph: Graph, rows: pd.DataFrame, free: Numbers) -> Numbers:
    """`Step.lag_ms`; `free` is when each action's rank had ended the one before."""
    producer = graph.dependencies[:, NEIGHBOUR_STAGE]
    receiver = np.flatnonzero((producer >= 0) & (graph.rank[producer] != graph.rank))
    sender = producer[receiver]
    start, end, ready = (rows[name].to_numpy(np.float64) for name in ("start_ms", "end_ms", "ready_ms"))
    # A table without ready_ms says nothing of messages: all of the wait is a gap.
    in_hand = np.fmin(np.nan_to_num(ready[receiver], nan=-np.inf), start[receiver])
    bound = np.maximum(in_hand - end[sender], 0.0)
    waited = in_hand > free[receiver] if _all_from(rows, *_KNOWS_ARRIVALS) else end[sender] >= free[receiver]
    pairs = pd.DataFrame({"from": graph.rank[sender], "to": graph.rank[receiver], "bound": bound, "waited": waited})
    by_pair = pairs.assign(lag=pairs["bound"].where(pairs["waited"])).groupby(["from", "to"])
    typical = by_pair["lag"].transform("median").fillna(by_pair["bound"].transform("min")).to_numpy(np.float64)
    lag = np.zeros(graph.n_actions)
    lag[sender] = np.where(waited, bound, np.minimum(bound, typical))
    return lag


def _latest(graph: Graph, end: Numbers, lag: Numbers, free: Numbers) -> tuple[Indices, Numbers]:
    """`Step.blocker`, and when that was: −inf where an action waits for nothing in the table."""
    blocker = np.where(np.isfinite(free), np.arange(graph.n_actions) - 1, -1)
    latest = free
    for needed in graph.dependencies.T:
        crosses = (needed >= 0) & (graph.rank[needed] != graph.rank)
        there = np.where(needed >= 0, end[needed] + np.where(crosses, lag[needed], 0.0), -np.inf)
        later = (needed >= 0) & (there >= latest)
        blocker, latest = np.where(later, needed, blocker), np.maximum(there, latest)
    return blocker, latest
