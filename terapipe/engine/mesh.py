"""Where a rank stands: the process groups it talks through, and when a step starts.

Dimensions data, pipe, op; only pipe is more than 1 today. Everything else in the engine asks this
object, never torch.distributed, for its rank: it is the PIPELINE rank. One rank alone has nobody to
talk to: it makes no process group.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from terapipe.engine.host import pin, sleep_until, unpinned
from terapipe.errors import RunError

TIMEOUT = timedelta(minutes=10)  # a dead rank is noticed in seconds by its launcher; this is the last resort
_START_MARGIN_NS = 3_000_000  # time for the agreed start to reach every rank


class PeerLostError(RunError):
    """Another rank went away: never the cause of a failure, only its echo."""


@contextmanager
def peers_needed(trouble: str = "lost contact with another rank") -> Iterator[None]:
    """Turn what torch.distributed raises when a peer is gone into `PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"{trouble}: {str(error).splitlines()[0]}") from error


class Mesh:
    """This rank's place among the pipeline's ranks."""

    def __init__(self, store: dist.TCPStore | dist.PrefixStore, rank: int, n_ranks: int) -> None:
        self.rank, self.n_ranks = rank, n_ranks
        self.groups: dict[tuple[int, ...], Any] = {}
        self.forward_group = self.backward_group = None
        self.one_clock = True  # perf_counter is the same clock on all ranks
        if n_ranks > 1:
            self._join(store)
        pin(rank)

    def _join(self, store: dist.TCPStore | dist.PrefixStore) -> None:
        ranks = range(self.n_ranks)
        with peers_needed("no contact with the other ranks (is GLOO_SOCKET_IFNAME an interface of this machine?)"):
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.n_ranks, timeout=TIMEOUT)
            # Two groups: forward and backward traffic never wait for each other.
            self.forward_group, self.backward_group = self._new_group(ranks), self._new_group(ranks)
        self.one_clock = len(set(self.gather(socket.gethostname()))) == 1

    def _new_group(self, ranks: range | tuple[int, ...]) -> Any:
        # gloo's own threads inherit the affinity of the moment; on the compute thread's core they
        # would wait a scheduler tick for it.
        with unpinned():
            return dist.new_group(list(ranks), timeout=TIMEOUT)

    def group_of(self, ranks: tuple[int, ...]) -> Any:
        """The process group of some ranks; every rank must ask, in the same order."""
        if ranks not in self.groups:
            with peers_needed():
                self.groups[ranks] = self._new_group(ranks)
        return self.groups[ranks]

    def gather(self, value: Any) -> list[Any]:
        """A small value of every rank, on every rank."""
        if self.n_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.n_ranks
        with peers_needed():
            dist.all_gather_object(values, value)
        return values

    def sum(self, tensor: torch.Tensor, ranks: tuple[int, ...] | None = None) -> torch.Tensor:
        """Sum in place over all ranks, or over some."""
        if self.n_ranks == 1:
            return tensor
        with peers_needed():
            dist.all_reduce(tensor, group=None if ranks is None else self.group_of(ranks))
        return tensor

    def barrier(self) -> None:
        """Wait for every rank, without using its core."""
        if self.n_ranks == 1:
            return
        with peers_needed():
            dist.barrier()

    def start_together(self) -> int:
        """Wait for the step's start; return it in perf_counter nanoseconds.

        On one machine rank 0 names a moment a little ahead, so that ranks do not start as staggered
        as they leave a barrier. Between machines clocks differ, and each takes its barrier's end.
        """
        self.barrier()
        if self.n_ranks == 1 or not self.one_clock:
            return time.perf_counter_ns()
        start = torch.tensor([time.perf_counter_ns() + _START_MARGIN_NS])
        with peers_needed():
            dist.broadcast(start, src=0)
        origin = int(start)
        sleep_until(origin)
        return origin

    def close(self) -> None:
        """Leave the process group."""
        if self.n_ranks > 1:
            dist.destroy_process_group()
