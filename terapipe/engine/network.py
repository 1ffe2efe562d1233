"""A slower network than the machine has: when a message counts as arrived, if its link were as given.

Every message is followed by a stamp, the moment at which the link would deliver it; the receiver has
the message already and waits for that moment. What the machine's own transport takes is hidden
behind the stamp, or comes on top where it is longer. Stamps are of one machine's clock.
"""

import time

import torch

from terapipe.cost import Links, find_link
from terapipe.engine.host import sharpen_timer, sleep_until
from terapipe.engine.mesh import Mesh
from terapipe.errors import RunError


class Network:
    """The links from this rank, and how long each is occupied."""

    def __init__(self, mesh: Mesh, links: Links) -> None:
        if not mesh.one_clock:
            raise RunError("link=…: a slower network is tried on one machine; these ranks are on several, whose clocks differ.")
        self.rank, self.links = mesh.rank, links
        self.free_ns: dict[int, int] = {}
        sharpen_timer()

    def begin_step(self) -> None:
        """All links are free."""
        self.free_ns = {}

    def stamp(self, target: int, n_bytes: int) -> torch.Tensor:
        """When a message that leaves now arrives; messages to one rank leave one behind another."""
        link = find_link(self.links, self.rank, target)
        sent = max(time.perf_counter_ns(), self.free_ns.get(target, 0)) + round(link.transmission_ms(n_bytes) * 1e6)
        self.free_ns[target] = sent
        return torch.tensor([sent + round(link.latency_ms * 1e6)])

    def hold_sender(self, target: int, stamp: torch.Tensor) -> None:
        """Without overlap the sender is busy until its message has arrived."""
        if not find_link(self.links, self.rank, target).overlap:
            sleep_until(int(stamp))
