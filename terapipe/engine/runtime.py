"""The interpreter: runs one rank's lowered actions in order and times each one.

It knows order, messages and clocks; what an action computes is its stage's business.
"""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch

from terapipe.cost import Links
from terapipe.engine.ledger import Ledger
from terapipe.engine.mesh import Mesh
from terapipe.engine.p2p import Mailbox
from terapipe.engine.stage import StepInputs
from terapipe.errors import RunError, SpecError
from terapipe.schedule import Action, Kind, Schedule, lower

RECEIVES, SENDS = (Kind.RECV_F, Kind.RECV_B), (Kind.SEND_F, Kind.SEND_B)


class RunsSlices(Protocol):
    """What the runtime needs of a stage: `engine.stage.Stage` or `engine.emulated.EmulatedStage`."""

    def begin_step(self, inputs: StepInputs) -> None:
        """Get ready for a step."""

    def run(self, action: Action, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run a compute action; return what the neighbouring stage needs, if anything."""


class TimedAction(NamedTuple):
    """An action that ran; perf_counter nanoseconds."""

    action: Action
    start_ns: int
    end_ns: int
    ready_ns: int
    n_bytes: int


class Runtime:
    """One rank, one schedule."""

    def __init__(
        self,
        mesh: Mesh,
        schedule: Schedule,
        stages: Mapping[int, RunsSlices],
        d_model: int,
        dtype: torch.dtype,
        link: Links | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        lowered = lower(schedule)
        self.mesh, self.schedule, self.stages = mesh, schedule, stages
        self.actions = lowered[mesh.rank]
        self.mailbox = Mailbox(mesh, schedule, lowered, d_model, dtype, link)
        self.ledger = ledger

    def run_step(self, inputs: StepInputs, fault: "Fault | None" = None) -> tuple[int, list[TimedAction]]:
        """Run every action once; return the step's start (nanoseconds) and the compute actions timed.

        A receive's wait ends where the input is there; the action's own time begins after it.
        """
        for stage in self.stages.values():
            stage.begin_step(inputs)
        self.mailbox.begin_step()
        watching = nullcontext if self.ledger is None else self.ledger.watching
        timed: list[TimedAction] = []
        inbox: dict[Action, torch.Tensor] = {}  # by the compute action that needs it
        arrived: dict[Action, int] = {}
        output: torch.Tensor | None = None
        origin = self.mesh.start_together()
        for action in self.actions:
            if action.kind in RECEIVES:
                needing = action._replace(kind=Kind.F if action.kind is Kind.RECV_F else Kind.B)
                inbox[needing] = self.mailbox.receive(action)
                arrived[needing] = time.perf_counter_ns()
            elif action.kind in SENDS:
                assert output is not None
                timed[-1] = timed[-1]._replace(n_bytes=self.mailbox.send(action, output))
            else:
                key = action._replace(kind=Kind.B) if action.kind is Kind.I else action
                if fault is not None:
                    fault.strike(action)
                start = time.perf_counter_ns()
                with watching():
                    output = self.stages[action.stage].run(action, inbox.pop(key, None))
                end = time.perf_counter_ns()
                timed.append(TimedAction(action, start, end, arrived.get(key, 0), 0))
                if self.ledger is not None:
                    self.ledger.record()
                self._hand_over(action, output, inbox, arrived, end)
        self.mailbox.finish_step()
        return origin, timed

    def _hand_over(
        self,
        action: Action,
        output: torch.Tensor | None,
        inbox: dict[Action, torch.Tensor],
        arrived: dict[Action, int],
        now: int,
    ) -> None:
        """Keep an output that a stage on this same rank needs."""
        target = action.stage + (1 if action.kind is Kind.F else -1)
        if output is None or action.kind is Kind.W or target not in self.stages:
            return
        needing = Action(target, Kind.F if action.kind is Kind.F else Kind.B, action.microbatch, action.slice)
        inbox[needing], arrived[needing] = output, now


class Fault(NamedTuple):
    """A failure to order, for tests: TERAPIPE_FAULT=rank:action:raise|exit3|kill, e.g. "1:1F0.2:kill".

    It strikes in the second measured step (in the first, if there is only one), so that an earlier
    step's timings are there to be kept.
    """

    rank: int
    action: Action
    how: str

    @classmethod
    def from_environment(cls) -> "Fault | None":
        """The fault that TERAPIPE_FAULT orders, if any."""
        text = os.environ.get("TERAPIPE_FAULT", "")
        if not text:
            return None
        parts = text.split(":")
        if len(parts) != 3 or not parts[0].isdigit() or parts[2] not in ("raise", "exit3", "kill"):
            raise SpecError(f"TERAPIPE_FAULT={text!r}: needs rank:action:raise|exit3|kill, e.g. '1:1F0.2:kill'.")
        return cls(int(parts[0]), Action.parse(parts[1]), parts[2])

    def strike(self, action: Action) -> None:
        """Fail, if this is the action."""
        if action != self.action:
            return
        if self.how == "raise":
            raise RunError(f"TERAPIPE_FAULT asked for this at {action}")
        if self.how == "exit3":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
