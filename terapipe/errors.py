"""Exceptions of the toolkit, and the wording they share. A leaf: it imports nothing of the package.

Everything a caller can mend is a `ValueError` raised before any process starts; what happens to a
running rank is a `RunError`. Every message quotes the value, says what is allowed and what to do.
"""

import difflib
import math
from collections.abc import Iterable
from numbers import Real
from operator import index


class TerapipeError(Exception):
    """Base of every exception that terapipe raises on purpose."""


class ConfigError(TerapipeError, ValueError):
    """A model, split of layers or preset that cannot be built."""


class CostError(TerapipeError, ValueError):
    """A cost model that cannot answer: a bad table, a negative time, a point it never measured."""


class SlicingError(TerapipeError, ValueError):
    """A slicing that does not describe whole sequences of equal length."""


class ScheduleError(TerapipeError, ValueError):
    """A schedule that is incomplete, out of order or deadlocked, or a family that cannot be built."""


class DeadlockError(ScheduleError):
    """Actions that wait for each other, so that none of them can ever start.

    Attributes
    ----------
    cycle : tuple of (rank, waiting action, action it needs)
        The shortest cycle; every needed action stands, on its own rank, at or behind the next waiting
        one, the last before the first. One entry: an action stands before one of its own rank that
        it needs.
    repair : (action, step) or None
        The shortest move of one action within its rank that makes the whole schedule valid:
        `schedule.move(*error.repair)`. None where no single move does.
    """

    def __init__(
        self, message: str, cycle: tuple[tuple[int, str, str], ...] = (), repair: tuple[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.cycle = cycle
        self.repair = repair


class TimelineError(TerapipeError, ValueError):
    """A table of timings that is not a timeline."""


class ExportError(TerapipeError, RuntimeError):
    """A figure that cannot be written: an unknown format, or no browser to draw the picture."""


class SpecError(TerapipeError, ValueError):
    """A run that cannot start as specified."""


class RunError(TerapipeError, RuntimeError):
    """A rank failed, or never answered, during a run.

    Attributes
    ----------
    rank : int or None
        The rank whose own fault it was, None where no single rank can be named.
    directory : str
        The run directory, which keeps the timings of all earlier steps and every rank's log.
    """

    def __init__(self, message: str, rank: int | None = None, directory: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.directory = directory


def unknown_name(what: str, given: object, allowed: Iterable[str]) -> str:
    """Message for a name that is not one of `allowed`, with the nearest that is."""
    names = [str(name) for name in allowed]
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}.{hint} Allowed: {', '.join(names)}."


def check_integer(name: str, value: object, least: int, error: type[TerapipeError]) -> int:
    """The integer, numpy's included, as an int; raise `error` unless it is one of at least `least`."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise error(f"{name}={value!r}: needs an integer of at least {least}.")
    return number


def as_number(value: object) -> float:
    """The real number, numpy's included, as Python's own; NaN, which no range holds, for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    return value if isinstance(value, int) else float(value)


def check_keys(what: str, given: Iterable[str], allowed: Iterable[str], error: type[TerapipeError]) -> None:
    """Raise `error` for the first key that is not allowed, naming the nearest that is."""
    names = list(allowed)
    for key in given:
        if key not in names:
            raise error(unknown_name(f"key of a {what}", key, names))
