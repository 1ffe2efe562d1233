"""Sends and receives of one rank, for one schedule.

Receives are posted ahead of need, in the order in which their sender sends; sends are asynchronous.
Shapes follow from the slicing, so nothing about them crosses the wire.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from terapipe.engine.mesh import Mesh, peers_needed
from terapipe.schedule import Action, Kind, Schedule

POSTED_AHEAD = 4  # receives waiting on one channel: enough to hide a message, few enough to bound memory


class Message(NamedTuple):
    """What travels: the output of `source` for a slice, to the neighbouring stage."""

    forward: bool
    source: int
    microbatch: int
    slice: int


class Mailbox:
    """Posts this rank's receives and sends, and hands out what has arrived."""

    def __init__(
        self, mesh: Mesh, schedule: Schedule, lowered: Sequence[Sequence[Action]], d_model: int, dtype: torch.dtype
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
        self.sending: list[tuple[Any, torch.Tensor]] = []

    def begin_step(self) -> None:
        """Post the first receives of every channel."""
        self.posted: dict[Message, tuple[Any, torch.Tensor]] = {}
        self.n_posted = dict.fromkeys(self.expected, 0)
        self.n_taken = dict.fromkeys(self.expected, 0)
        for channel in self.expected:
            self._post(channel, POSTED_AHEAD)

    def receive(self, action: Action) -> torch.Tensor:
        """Wait for the message that a RECV action names."""
        message = received_message(action)
        channel = (self.homes[message.source], message.forward)
        while message not in self.posted:  # the receiver's order differs from the sender's
            self._post(channel, self.n_posted[channel] + 1)
        work, tensor = self.posted.pop(message)
        with peers_needed():
            work.wait()
        self.n_taken[channel] += 1
        self._post(channel, self.n_taken[channel] + POSTED_AHEAD)
        return tensor

    def send(self, action: Action, tensor: torch.Tensor) -> int:
        """Start the message that a SEND action names; return its bytes."""
        message = sent_message(action)
        tensor = tensor.contiguous()
        with peers_needed():
            work = dist.isend(tensor, self._target(action), group=self._group(message), tag=self._tag(message))
        self.sending = [(other, kept) for other, kept in self.sending if not other.is_completed()]
        self.sending.append((work, tensor))  # the tensor must live until it has left
        return tensor.nbytes

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
            with peers_needed():
                work = dist.irecv(tensor, channel[0], group=self._group(message), tag=self._tag(message))
            self.posted[message] = (work, tensor)
        self.n_posted[channel] = max(self.n_posted[channel], min(n_posted, len(messages)))

    def _target(self, action: Action) -> int:
        return self.homes[action.stage + (1 if action.kind is Kind.SEND_F else -1)]

    def _group(self, message: Message) -> Any:
        return self.mesh.forward_group if message.forward else self.mesh.backward_group

    def _tag(self, message: Message) -> int:
        unit = self.schedule.slicing.first_units[message.microbatch] + message.slice
        return message.source * len(self.schedule.slicing.units) + unit


def sent_message(action: Action) -> Message:
    """The message of a SEND action, whose stage is the source."""
    return Message(action.kind is Kind.SEND_F, action.stage, action.microbatch, action.slice)


def received_message(action: Action) -> Message:
    """The message of a RECV action, whose stage is the target."""
    forward = action.kind is Kind.RECV_F
    return Message(forward, action.stage + (-1 if forward else 1), action.microbatch, action.slice)
