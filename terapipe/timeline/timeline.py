"""The timings table that both back ends emit, one row an executed action, and what it tells.

Simulated and measured timelines have the same columns; `source` says which one a table is. Times
are milliseconds from the step's start; steps below 0 are warm-up and count in no metric.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from terapipe.errors import TimelineError
from terapipe.timeline.budget import find_budget

COLUMNS = [
    *("source", "step", "rank", "stage", "kind", "microbatch", "slice"),
    *("n_sequences", "slice_tokens", "context_tokens"),
    *("start_ms", "end_ms", "ready_ms", "blocked_by", "n_bytes"),
]
SIMULATED = "simulated"
SIMULATED_EXTRAPOLATED = "simulated, extrapolated"  # with costs of slices beyond what was measured
EMULATED = "emulated"
EMULATED_EXTRAPOLATED = "emulated, extrapolated"
MEASURED = "measured"
_REQUIRED = ("rank", "kind", "microbatch", "slice", "start_ms", "end_ms")
_KINDS = ("F", "B", "I", "W")


class Timeline:
    """When every action ran.

    Parameters
    ----------
    frame : DataFrame, or a function that makes it
        The table below; a function is called when the table is first looked at.

    Attributes
    ----------
    frame : DataFrame
        source ("simulated" or "emulated", either with ", extrapolated", "measured" or "given"), step,
        rank, stage, kind, microbatch, slice, n_sequences, slice_tokens, context_tokens, start_ms,
        end_ms, ready_ms (when the last input was there; measured: no later than), blocked_by (text
        of the action that it waited for last), n_bytes (message sent on).

    Raises
    ------
    TimelineError
        For a table without rows or a needed column, an unknown kind, an action that ends before it starts.
    """

    def __init__(self, frame: pd.DataFrame | Callable[[], pd.DataFrame]) -> None:
        if callable(frame):
            self._make_frame = frame
        else:
            self.frame = _checked(frame)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The table; see the class."""
        return self._make_frame()

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> "Timeline":
        """A timeline from any table of rank, kind, microbatch, slice, start_ms, end_ms.

        Missing columns are filled in: one step, stage = rank, unknown tokens, no bytes.

        Raises
        ------
        TimelineError
            Where a needed column is missing, a kind is unknown, or an action ends before it starts.
        """
        _need_columns(frame, _REQUIRED)
        defaults: dict[str, Any] = {
            "source": "given",
            "step": 0,
            "stage": frame["rank"],
            "n_sequences": 1,
            "slice_tokens": np.nan,
            "context_tokens": np.nan,
            "ready_ms": np.nan,
            "blocked_by": "",
            "n_bytes": 0,
        }
        filled = frame.assign(**{name: value for name, value in defaults.items() if name not in frame})
        ordered = filled.sort_values(["step", "rank", "start_ms"], kind="stable")
        return cls(ordered[COLUMNS].reset_index(drop=True))

    @property
    def source(self) -> str:
        """Where the times come from; "mixed" where from several places."""
        found = self.frame["source"].unique()
        return str(found[0]) if len(found) == 1 else "mixed"

    @property
    def is_simulated(self) -> bool:
        """Whether every time is simulated, of slices whose costs are extrapolated too."""
        return set(self.frame["source"]) <= {SIMULATED, SIMULATED_EXTRAPOLATED}

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return int(self.frame["rank"].nunique())

    @cached_property
    def measured(self) -> pd.DataFrame:
        """The rows that count: warm-up steps left out, unless there is nothing else."""
        counted = self.frame[self.frame["step"] >= 0]
        return self.frame if counted.empty else counted

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a measured step: makespan_ms, busy_ms (of all ranks), n_tokens; index = step."""
        rows = self.measured
        groups = rows.groupby("step")
        table = pd.DataFrame(
            {
                "makespan_ms": groups["end_ms"].max() - groups["start_ms"].min(),
                "busy_ms": (rows["end_ms"] - rows["start_ms"]).groupby(rows["step"]).sum(),
            }
        )
        first = rows[(rows["stage"] == rows["stage"].min()) & (rows["kind"] == "F")]
        tokens = (first["slice_tokens"] * first["n_sequences"]).groupby(first["step"]).sum(min_count=1)
        return table.assign(n_tokens=tokens.reindex(table.index))

    @property
    def makespan_ms(self) -> float:
        """First action's start to last action's end; the median over measured steps."""
        return float(self.steps["makespan_ms"].median())

    @property
    def bubble_fraction(self) -> float:
        """Idle time ÷ (n_ranks × makespan); the median over measured steps."""
        return float((1 - self.steps["busy_ms"] / (self.n_ranks * self.steps["makespan_ms"])).median())

    @property
    def bubble_overhead(self) -> float:
        """Idle time ÷ busy time; the median over measured steps."""
        return float((self.n_ranks * self.steps["makespan_ms"] / self.steps["busy_ms"] - 1).median())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step ÷ its makespan; the median over measured steps, NaN where tokens are unknown."""
        return float((self.steps["n_tokens"] / self.steps["makespan_ms"] * 1e3).median())

    def peak_in_flight(self) -> pd.Series:
        """Most units (microbatch slices) on each rank whose forward is done and whose backward is not.

        A unit is held from its F to its B, or to its W where the backward is split. Index = rank.
        """
        rows = self.measured.sort_values(["step", "rank", "start_ms"], kind="stable")
        change = rows["kind"].map({"F": 1, "B": -1, "W": -1, "I": 0}).astype(int)
        in_flight = change.groupby([rows["step"], rows["rank"]]).cumsum()
        return in_flight.groupby(rows["rank"]).max().rename("peak_in_flight")

    def budget(self) -> pd.Series:
        """Where the ranks' time went, in rank-milliseconds; adds up to n_ranks × makespan_ms (`timeline.budget`)."""
        return find_budget(self)


def _checked(frame: pd.DataFrame) -> pd.DataFrame:
    _need_columns(frame, COLUMNS)
    if frame.empty:
        raise TimelineError("a timeline needs at least one row.")
    unknown = sorted(set(frame["kind"].astype(str)) - set(_KINDS))
    if unknown:
        raise TimelineError(f"kinds {unknown} in a timeline; allowed: {list(_KINDS)}.")
    start, end = (frame[name].to_numpy(dtype=np.float64) for name in ("start_ms", "end_ms"))
    impossible = ~(np.isfinite(start) & np.isfinite(end) & (end >= start))
    if impossible.any():
        row = frame[impossible].iloc[0].to_dict()
        raise TimelineError(f"an action ends before it starts, or its times are not finite: {row}.")
    return frame


def _need_columns(frame: pd.DataFrame, names: Iterable[str]) -> None:
    missing = [name for name in names if name not in frame]
    if missing:
        raise TimelineError(
            f"a timeline needs the column(s) {missing}; given: {list(frame.columns)}. "
            f"Timeline.from_frame fills in all but {list(_REQUIRED)}."
        )
