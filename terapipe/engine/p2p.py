"""Sends and receives of one rank, for one schedule.

Receives are posted ahead of need, in the order in which their sender sends; sends are asynchronous.
Shapes follow from the slicing, so nothing about them crosses the wire.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from terapipe.cost import Links
from terapipe.engine.host import sleep_until
from terapipe.engine.mesh import Mesh, peers_needed
from terapipe.engine.network import Network
from terapipe.schedule import Action, Kind, Schedule

POSTED_AHEAD = 4  # receives waiting on one channel: enough to hide a message
POSTED_BYTES = 2**26  # more of them wait as long as their memory stays small: posting one takes time from the rank's step


class Message(NamedTuple):
    """What travels: the output of `source` for a slice, to the neighbouring stage."""

    forward: bool
    source: int
    microbatch: int
    slice: int


class Posted(NamedTuple):
    """A receive that was posted: what it fills, and what to wait for."""

    works: list[Any]
    tensor: torch.Tensor
    stamp: torch.Tensor | None


class Mailbox:
    """Posts this rank's receives and sends, and hands out what has arrived."""

    def __init__(
        self,
        mesh: Mesh,
        schedule: Schedule,
        lowered: Sequence[Sequence[Action]],
        d_model: int,
        dtype: torch.dtype,
        link: Links | None = None,
    ) -> None:
        self.mesh, self.schedule, self.d_model, self.dtype = mesh, schedule, d_model, dtype
        self.homes = schedule.stage_to_rank
        # channel (source rank, forward?) → its messages to this rank, in the sender's order
        self.expected: dict[tuple[int, bool], list[Message]] = {}
        for rank, actions in enumerate(lowered):
            for action in actions:
                if action.kind in (Kind.SEND_F, Kind.SEND_B) and self._target(action) == mesh.rank:
                    message = sent_message(action)
                    self.expected.setdefault((rank, message.forward), []).append(message)
        value_bytes = torch.empty((), dtype=dtype).itemsize
        longest = int((schedule.slicing.units[:, 2] * schedule.slicing.units[:, 4]).max())
        self.n_ahead = max(POSTED_AHEAD, POSTED_BYTES // (longest * d_model * value_bytes))
        self.sending: list[tuple[Any, torch.Tensor]] = []
        self.network = None if link is None else Network(mesh, link)

    def begin_step(self) -> None:
        """Post the first receives of every channel."""
        self.posted: dict[Message, Posted] = {}
        self.n_posted = dict.fromkeys(self.expected, 0)
        self.n_taken = dict.fromkeys(self.expected, 0)
        if self.network is not None:
            self.network.begin_step()
        for channel in self.expected:
            self._post(channel, self.n_ahead)

    def receive(self, action: Action) -> torch.Tensor:
        """Wait for the message that a RECV action names."""
        message = received_message(action)
        channel = (self.homes[message.source], message.forward)
        while message not in self.posted:  # the receiver's order differs from the sender's
            self._post(channel, self.n_posted[channel] + 1)
        posted = self.posted.pop(message)
        with peers_needed():
            for work in posted.works:
                work.wait()
        if posted.stamp is not None:
            sleep_until(int(posted.stamp))
        self.n_taken[channel] += 1
        self._post(channel, self.n_taken[channel] + self.n_ahead)
        return posted.tensor

    def send(self, action: Action, tensor: torch.Tensor) -> int:
        """Start the message that a SEND action names; return its bytes."""
        message, target = sent_message(action), self._target(action)
        tensor = tensor.contiguous()
        self._start(tensor, target, message, self._tag(message))
        if self.network is not None:
            stamp = self.network.stamp(target, tensor.nbytes)
            self._start(stamp, target, message, self._stamp_tag(message))
            self.network.hold_sender(target, stamp)
        self.sending = [(work, kept) for work, kept in self.sending if not work.is_completed()]
        return tensor.nbytes

    def _start(self, tensor: torch.Tensor, target: int, message: Message, tag: int) -> None:
        with peers_needed():
            work = self._group(message).send([tensor], target, tag)
        self.sending.append((work, tensor))  # the tensor must live until it has left

    def finish_step(self) -> None:
        """Wait until every send has left."""
        with peers_needed():
            for work, _ in self.sending:
                work.wait()
        self.sending = []

    def _post(self, channel: tuple[int, bool], n_posted: int) -> None:
        messages = self.expected[channel]
        for message in messages[self.n_posted[channel] : n_posted]:
            slices = self.schedule.slicing.microbatches[message.microbatch]
            tensor = torch.empty((slices.n_sequences, slices.slice_tokens[message.slice], self.d_model), dtype=self.dtype)
            stamp = None if self.network is None else torch.zeros(1, dtype=torch.int64)
            wanted = [(tensor, self._tag(message))] + ([] if stamp is None else [(stamp, self._stamp_tag(message))])
            with peers_needed():
                works = [self._group(message).recv([each], channel[0], tag) for each, tag in wanted]
            self.posted[message] = Posted(works, tensor, stamp)
        self.n_posted[channel] = max(self.n_posted[channel], min(n_posted, len(messages)))

    def _target(self, action: Action) -> int:
        return self.homes[action.stage + (1 if action.kind is Kind.SEND_F else -1)]

    def _group(self, message: Message) -> Any:
        return self.mesh.forward_group if message.forward else self.mesh.backward_group

    def _tag(self, message: Message) -> int:
        unit = self.schedule.slicing.first_units[message.microbatch] + message.slice
        return message.source * len(self.schedule.slicing.units) + unit

    def _stamp_tag(self, message: Message) -> int:
        return self._tag(message) + len(self.homes) * len(self.schedule.slicing.units)


def sent_message(action: Action) -> Message:
    """The message of a SEND action, whose stage is the source."""
    return Message(action.kind is Kind.SEND_F, action.stage, action.microbatch, action.slice)


def received_message(action: Action) -> Message:
    """The message of a RECV action, whose stage is the target."""
    forward = action.kind is Kind.RECV_F
    return Message(forward, action.stage + (-1 if forward else 1), action.microbatch, action.slice)
