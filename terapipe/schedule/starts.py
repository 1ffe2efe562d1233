"""When every action starts, from plain numbers: a duration an action, a lag a transfer.

A discrete-event core: heaps ordered by (time, serial), no wall clock, no randomness. The simulator
feeds it modelled times; a measured timeline can feed it its own.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from terapipe.schedule.graph import NEIGHBOUR_SLICE, NEIGHBOUR_STAGE, OWN, Graph

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Transfers:
    """What each action's output costs on its way to another rank; ignored where it stays.

    Attributes
    ----------
    transmission_ms, latency_ms : array (n_actions,)
        Messages from one rank to another leave one behind another, each occupying the link for its
        transmission; latency comes on top and does not occupy it.
    blocks_sender : bool array (n_actions,)
        The sender starts nothing before its message has arrived.
    """

    transmission_ms: Numbers
    latency_ms: Numbers
    blocks_sender: npt.NDArray[np.bool_]


class Starts(NamedTuple):
    """Times of each action of a graph, in the graph's order.

    `ready_ms` is when its last input was there; `blocked_by` is the index of the action that it
    waited for last: an input's producer, or the one before it on the rank; −1 for none.
    """

    start_ms: Numbers
    end_ms: Numbers
    ready_ms: Numbers
    blocked_by: npt.NDArray[np.int64]


def earliest_starts(graph: Graph, duration_ms: Numbers, transfers: Transfers | None = None, contention: float = 1.0) -> Starts:
    """Start every action as early as its rank's order, its inputs and its messages allow.

    Parameters
    ----------
    graph : Graph
        A valid schedule.
    duration_ms : array (n_actions,)
        Time of each action on a machine to itself.
    transfers : Transfers, optional
        Free messages by default.
    contention : float
        While two or more ranks compute, each progresses at 1/contention.
    """
    return _Replay(graph, duration_ms, transfers, contention).run()


class _Replay:
    """One pass over the events. Compute advances on a work clock, which contention slows; messages do not."""

    def __init__(self, graph: Graph, duration_ms: Numbers, transfers: Transfers | None, contention: float) -> None:
        n = graph.n_actions
        self.duration: list[float] = np.asarray(duration_ms, dtype=np.float64).tolist()
        self.rank: list[int] = graph.rank.tolist()
        ends = np.searchsorted(graph.rank, np.arange(len(graph.orders)), side="right")
        self.rank_end: list[int] = ends.tolist()
        self.head: list[int] = np.append(0, ends[:-1]).tolist()
        self.n_needed: list[int] = (graph.dependencies >= 0).sum(axis=1).tolist()
        self.local, self.remote = _successors(graph)
        self.receiver: list[int] = graph.receiver.tolist()
        free = Transfers(np.zeros(n), np.zeros(n), np.zeros(n, dtype=bool))
        chosen = transfers or free
        self.transmission: list[float] = chosen.transmission_ms.tolist()
        self.latency: list[float] = chosen.latency_ms.tolist()
        self.blocks_sender: list[bool] = (chosen.blocks_sender & graph.crosses).tolist()
        self.contention = contention
        self.start, self.end, self.ready = [0.0] * n, [0.0] * n, [0.0] * n
        self.blocked_by, self.waited_for = [-1] * n, [-1] * n
        self.rank_busy = [False] * len(graph.orders)
        self.rank_free = [0.0] * len(graph.orders)
        self.link_free: dict[tuple[int, int], float] = {}
        self.now = self.work = 0.0
        self.n_computing = 0
        self.computing: list[tuple[float, int]] = []  # (work clock at its end, action)
        self.arriving: list[tuple[float, int, int]] = []  # (time, action whose message arrives or −1, rank set free or −1)

    def run(self) -> Starts:
        for rank in range(len(self.head)):
            self._start_next(rank)
        while self.computing or self.arriving:
            slowdown = self.contention if self.n_computing > 1 else 1.0
            compute_end = self.now + (self.computing[0][0] - self.work) * slowdown if self.computing else np.inf
            if self.arriving and self.arriving[0][0] <= compute_end:
                time, message, freed = heapq.heappop(self.arriving)
                self.work += (time - self.now) / slowdown
                self.now = time
                self._arrive(message, freed)
            else:
                self.work, action = heapq.heappop(self.computing)
                self.now = compute_end
                self._finish(action)
        blocked_by = np.asarray(self.blocked_by, dtype=np.int64)
        return Starts(np.asarray(self.start), np.asarray(self.end), np.asarray(self.ready), blocked_by)

    def _start_next(self, rank: int) -> None:
        """Start the rank's next action if the rank is free and the inputs are there."""
        action = self.head[rank]
        if self.rank_busy[rank] or action >= self.rank_end[rank] or self.n_needed[action]:
            return
        self.head[rank] += 1
        self.rank_busy[rank] = True
        self.n_computing += 1
        self.start[action] = self.now
        waited = self.ready[action] >= self.rank_free[rank] and self.waited_for[action] >= 0
        before = action - 1 if action > 0 and self.rank[action - 1] == rank else -1
        self.blocked_by[action] = self.waited_for[action] if waited else before
        heapq.heappush(self.computing, (self.work + self.duration[action], action))

    def _finish(self, action: int) -> None:
        rank, now = self.rank[action], self.now
        self.end[action] = now
        self.n_computing -= 1
        for successor in self.local[action]:
            self._satisfy(successor, action)
        successor = self.remote[action]
        arrival = now
        if successor >= 0:
            link = (rank, self.receiver[action])
            sent = max(now, self.link_free.get(link, 0.0)) + self.transmission[action]
            self.link_free[link] = sent
            arrival = sent + self.latency[action]
            if arrival > now:
                freed = rank if self.blocks_sender[action] else -1
                heapq.heappush(self.arriving, (arrival, action, freed))
            else:
                self._satisfy(successor, action)
                self._start_next(self.rank[successor])
        if not (self.blocks_sender[action] and arrival > now):
            self._free(rank)
        # A stage handed over on the same rank is the rank's own business: _free has looked at it.

    def _arrive(self, message: int, freed: int) -> None:
        successor = self.remote[message]
        self._satisfy(successor, message)
        self._start_next(self.rank[successor])
        if freed >= 0:
            self._free(freed)

    def _free(self, rank: int) -> None:
        self.rank_busy[rank] = False
        self.rank_free[rank] = self.now
        self._start_next(rank)

    def _satisfy(self, action: int, producer: int) -> None:
        self.n_needed[action] -= 1
        self.ready[action] = self.now
        self.waited_for[action] = producer


def _successors(graph: Graph) -> tuple[list[list[int]], list[int]]:
    """Actions that each one enables on its own rank, and the one on another rank (−1 for none)."""
    local: list[list[int]] = [[] for _ in range(graph.n_actions)]
    remote = [-1] * graph.n_actions
    ranks = graph.rank.tolist()
    for column in (NEIGHBOUR_STAGE, NEIGHBOUR_SLICE, OWN):
        for action, needed in enumerate(graph.dependencies[:, column].tolist()):
            if needed < 0:
                continue
            if ranks[needed] == ranks[action]:
                local[needed].append(action)
            else:
                remote[needed] = action
    return local, remote
