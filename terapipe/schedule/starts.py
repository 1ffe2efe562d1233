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
        bounds = np.searchsorted(graph.rank, np.arange(len(graph.orders) + 1)).tolist()
        self.rank_start, self.rank_end, self.head = bounds[:-1], bounds[1:], bounds[:-1].copy()
        self.n_needed: list[int] = (graph.dependencies >= 0).sum(axis=1).tolist()
        self.local, self.remote = _successors(graph)
        self.receiver: list[int] = graph.receiver.tolist()
        self.is_free = transfers is None
        chosen = transfers or Transfers(np.zeros(n), np.zeros(n), np.zeros(n, dtype=bool))
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
        self.head[rank] = action + 1
        self.rank_busy[rank] = True
        self.n_computing += 1
        self.start[action] = self.now
        waited_for = self.waited_for[action]
        if waited_for >= 0 and self.ready[action] >= self.rank_free[rank]:
            self.blocked_by[action] = waited_for
        elif action > self.rank_start[rank]:
            self.blocked_by[action] = action - 1
        heapq.heappush(self.computing, (self.work + self.duration[action], action))

    def _finish(self, action: int) -> None:
        rank, now = self.rank[action], self.now
        self.end[action] = now
        self.n_computing -= 1
        for successor in self.local[action]:
            self._satisfy(successor, action)
        successor, arrival = self.remote[action], now
        if successor >= 0:
            arrival = self._send(action, rank)
            if arrival > now:
                freed = rank if self.blocks_sender[action] else -1
                heapq.heappush(self.arriving, (arrival, action, freed))
            else:
                self._satisfy(successor, action)
                self._start_next(self.rank[successor])
        if arrival == now or not self.blocks_sender[action]:
            self._free(rank)

    def _send(self, action: int, rank: int) -> float:
        """When the action's message arrives; it occupies the link meanwhile."""
        if self.is_free:
            return self.now
        link = (rank, self.receiver[action])
        sent = max(self.now, self.link_free.get(link, 0.0)) + self.transmission[action]
        self.link_free[link] = sent
        return sent + self.latency[action]

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
    remote = np.full(graph.n_actions, -1)
    for column in (NEIGHBOUR_STAGE, NEIGHBOUR_SLICE, OWN):
        needed = graph.dependencies[:, column]
        crosses = (needed >= 0) & (graph.rank[needed] != graph.rank)
        remote[needed[crosses]] = np.flatnonzero(crosses)
        stays = np.flatnonzero((needed >= 0) & ~crosses)
        for action, producer in zip(stays.tolist(), needed[stays].tolist(), strict=True):
            local[producer].append(action)
    return local, remote.tolist()
