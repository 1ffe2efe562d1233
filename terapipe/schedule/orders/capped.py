"""svpp: the shortest order found that keeps at most `max_in_flight` units on any rank (after MEPipe).

The layer knows no costs, so "shortest" is at 1 unit of time a forward and 2 a backward, of any slice.
Candidates, for every cap up to the one given, so that a larger cap never makes it slower:

(a) seq1f1b, or seq1f1b-interleaved, with the warm-up cut to the cap;
(b) event-driven: a rank that is free runs its next backward if it is ready, else its next forward
    if fewer units than the cap, and than that order's warm-up + 1, are in flight.
"""

import heapq
from functools import lru_cache

import numpy as np

from terapipe.errors import ScheduleError, check_integer
from terapipe.schedule.action import Action, Kind
from terapipe.schedule.graph import F_CODE
from terapipe.schedule.orders.family import Family
from terapipe.schedule.orders.interleaved import count_looped_warmup, group_units, looped_streams, ragged_groups
from terapipe.schedule.orders.one_f_one_b import alternate
from terapipe.schedule.orders.pipeline import Order, Pipeline
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.starts import earliest_starts

FORWARD, BACKWARD = 1.0, 2.0  # units of time


def least_in_flight(pipeline: Pipeline) -> int:
    """Units that a rank holds before its first backward can run: (v−1)G + k."""
    return (pipeline.chunks_per_rank - 1) * group_units(pipeline) + pipeline.n_slices


def svpp(pipeline: Pipeline, max_in_flight: int) -> list[Order]:
    """The shortest of the candidates of every cap up to `max_in_flight`; of equally short ones that of the least cap."""
    least = least_in_flight(pipeline)
    cap = check_integer("max_in_flight", max_in_flight, 1, ScheduleError)
    if cap < least:
        raise ScheduleError(
            f"max_in_flight={cap}: svpp needs at least {least} units on a rank here, as a rank holds that many before "
            f"its first backward can run. Give max_in_flight={least} or more, or a slicing with fewer slices."
        )
    # Beyond the longest warm-up + 1 a cap changes nothing.
    longest = max(count_looped_warmup(pipeline, rank) for rank in range(pipeline.n_ranks))
    tried = range(least, max(least, min(cap, longest + 1)) + 1)
    return min((_best_at(pipeline, each) for each in tried), key=lambda found: found[0])[1]


@lru_cache(maxsize=256)  # whoever looks for a cap asks for many
def _best_at(pipeline: Pipeline, cap: int) -> tuple[float, list[Order]]:
    """The shorter of the two candidates of one cap, and how long it takes."""
    ranks = range(pipeline.n_ranks)
    streams = [looped_streams(pipeline, rank) for rank in ranks]
    warmups = [count_looped_warmup(pipeline, rank) for rank in ranks]
    cut = [list(alternate(*streams[rank], min(warmups[rank], cap - 1))) for rank in ranks]
    eager = _Eager(pipeline, streams, [min(cap, warmup + 1) for warmup in warmups]).run()
    return min(((_makespan(pipeline, orders), orders) for orders in (cut, eager)), key=lambda found: found[0])


def _makespan(pipeline: Pipeline, orders: list[Order]) -> float:
    graph = Schedule(tuple(map(tuple, orders)), pipeline.slicing).graph
    return float(earliest_starts(graph, np.where(graph.kind == F_CODE, FORWARD, BACKWARD)).end_ms.max())


class _Eager:
    """Candidate (b): every rank runs whatever of its next backward and next forward it can, backwards first."""

    def __init__(self, pipeline: Pipeline, streams: list[tuple[Order, Order]], caps: list[int]) -> None:
        self.last_stage = pipeline.n_ranks * pipeline.chunks_per_rank - 1
        self.n_slices = [microbatch.n_slices for microbatch in pipeline.slicing.microbatches]
        self.streams, self.caps = streams, caps
        self.orders: list[Order] = [[] for _ in streams]
        self.n_forwards, self.n_backwards = [0] * len(streams), [0] * len(streams)
        self.ended: set[Action] = set()

    def run(self) -> list[Order]:
        running: list[tuple[float, int, Action]] = []
        free = set(range(len(self.streams)))
        now = 0.0
        while True:
            for rank in sorted(free):
                action = self._choose(rank)
                if action is not None:
                    self.orders[rank].append(action)
                    heapq.heappush(running, (now + (FORWARD if action.kind is Kind.F else BACKWARD), rank, action))
                    free.remove(rank)
            if not running:
                return self.orders
            now = running[0][0]
            while running and running[0][0] == now:
                _, rank, action = heapq.heappop(running)
                self.ended.add(action)
                free.add(rank)

    def _choose(self, rank: int) -> Action | None:
        """The rank's next action, now that it is free; None to wait."""
        forwards, backwards = self.streams[rank]
        n_forwards, n_backwards = self.n_forwards[rank], self.n_backwards[rank]
        if n_backwards < len(backwards) and self._is_ready(backwards[n_backwards]):
            self.n_backwards[rank] += 1
            return backwards[n_backwards]
        has_room = n_forwards - n_backwards < self.caps[rank]
        if has_room and n_forwards < len(forwards) and self._is_ready(forwards[n_forwards]):
            self.n_forwards[rank] += 1
            return forwards[n_forwards]
        return None

    def _is_ready(self, action: Action) -> bool:
        # A rank's own earlier slices have run: its streams hold them in that order.
        stage, kind, microbatch, _ = action
        if kind is Kind.F:
            return stage == 0 or action._replace(stage=stage - 1) in self.ended
        if stage < self.last_stage and action._replace(stage=stage + 1) not in self.ended:
            return False
        last = Action(stage, Kind.F, microbatch, self.n_slices[microbatch] - 1)
        return last in self.ended


def misfit(pipeline: Pipeline) -> str:
    """What is wrong where several stages a rank meet slices that seq1f1b-interleaved cannot order; "" if nothing is."""
    if pipeline.chunks_per_rank > 1 and not pipeline.has_equal_counts:
        return (
            f"svpp with {pipeline.chunks_per_rank} stages a rank needs as many slices in every microbatch as in any other; "
            f"the slicing is {pipeline.slicing}. With chunks_per_rank=1 it takes any."
        )
    return ragged_groups(pipeline)


FAMILIES = (
    Family(
        "svpp",
        svpp,
        any_chunks=True,
        options={"max_in_flight": "the most units on any rank, at least (v−1)·G + k"},
        misfit=misfit,
        alternatives=("seq1f1b",),
        bubble="the shortest found; never rises with max_in_flight",
        condition="1 unit of time a forward, 2 a backward",
        peak_activations="max_in_flight/(k·v)",
        source="MEPipe, doi 10.1145/3689031.3717469",
    ),
)
