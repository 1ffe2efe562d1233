"""One operation of one stage on one slice, as a value with a text form: "2F0.3"."""

import re
from enum import StrEnum
from typing import NamedTuple

from terapipe.errors import ScheduleError, unknown_name


class Kind(StrEnum):
    """What an action does (torch's letters; zero-bubble papers write B for I, and BW for B)."""

    F = "F"  # forward
    B = "B"  # full backward: I and W in one
    I = "I"  # input gradient  # noqa: E741 - the field's letter
    W = "W"  # weight gradient
    SEND_F = "SEND_F"  # a stage's output to the next stage
    RECV_F = "RECV_F"  # a stage's input from the stage before
    SEND_B = "SEND_B"  # the gradient of a stage's input to the stage before
    RECV_B = "RECV_B"  # the gradient of a stage's output from the next stage


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
RESERVED = ("R", "OPT", "REDUCE")  # recompute, optimizer step, gradient reduction: not built yet
_TEXT = re.compile(r"(\d+)([A-Z_]+)(\d+)(?:\.(\d+))?")


class Action(NamedTuple):
    """Stage, kind, microbatch and slice; `str(action)` is "2F0.3" and `Action.parse` reads it back.

    "2F0" parses as slice 0 of microbatch 0.
    """

    stage: int
    kind: Kind
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}.{self.slice}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read "2F0.3".

        Raises
        ------
        ScheduleError
            Where `text` is not an action.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; write stage, kind, microbatch, slice, like '2F0.3' or '2B0'.")
        stage, kind, microbatch, place = match.groups(default="0")
        if kind in RESERVED:
            raise ScheduleError(f"{text!r}: the kind {kind} is reserved, schedules cannot use it yet. Allowed: F, B, I, W.")
        if kind not in Kind.__members__:
            raise ScheduleError(f"{text!r}: {unknown_name('kind of action', kind, Kind.__members__)}")
        return cls(int(stage), Kind[kind], int(microbatch), int(place))
