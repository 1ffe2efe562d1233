"""The timings table that both back ends emit, one row an executed action, and what it tells.

Simulated and measured timelines have the same columns; `source` says which one a table is. Times
are milliseconds from the step's start; steps below 0 are warm-up and count in no metric.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.errors import TimelineError

COLUMNS = [
    *("source", "step", "rank", "stage", "kind", "microbatch", "slice"),
    *("n_sequences", "slice_tokens", "context_tokens"),
    *("start_ms", "end_ms", "ready_ms", "blocked_by", "n_bytes"),
]
BUDGET = ("compute", "communication", "dependency", "fill", "drain", "runtime")
SIMULATED = "simulated"
SIMULATED_EXTRAPOLATED = "simulated, extrapolated"  # with costs of slices beyond what was measured
EMULATED = "emulated"
EMULATED_EXTRAPOLATED = "emulated, extrapolated"
MEASURED = "measured"
_REQUIRED = ("rank", "kind", "microbatch", "slice", "start_ms", "end_ms")
_KINDS = ("F", "B", "I", "W")


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every action ran.

    Attributes
    ----------
    frame : DataFrame
        source ("simulated" or "emulated", either with ", extrapolated", "measured" or "given"), step,
        rank, stage, kind, microbatch, slice, n_sequences, slice_tokens, context_tokens, start_ms,
        end_ms, ready_ms (when the last input was there; measured: no later than), blocked_by (text
        of the action that it waited for last), n_bytes (message sent on).
    """

    frame: pd.DataFrame

    def __post_init__(self) -> None:
        _need_columns(self.frame, COLUMNS)
        if self.frame.empty:
            raise TimelineError("a timeline needs at least one row.")
        unknown = sorted(set(self.frame["kind"].astype(str)) - set(_KINDS))
        if unknown:
            raise TimelineError(f"kinds {unknown} in a timeline; allowed: {list(_KINDS)}.")
        start, end = (self.frame[name].to_numpy(dtype=np.float64) for name in ("start_ms", "end_ms"))
        impossible = ~(np.isfinite(start) & np.isfinite(end) & (end >= start))
        if impossible.any():
            row = self.frame[impossible].iloc[0].to_dict()
            raise TimelineError(f"an action ends before it starts, or its times are not finite: {row}.")

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
        """Where the ranks' time went, in rank-milliseconds; adds up to n_ranks × makespan_ms.

        compute
            Actions running.
        fill, drain
            Before a rank's first action and after its last.
        dependency
            Between actions: until the last input's producer has ended.
        communication
            Then until the input is there; in a simulation also while a send blocks its rank.
        runtime
            Then until the action starts.

        Shares are means over measured steps, times n_ranks × the median makespan.
        """
        shares = pd.concat([self._shares(rows) for _, rows in self.measured.groupby("step")], axis=1).mean(axis=1)
        return (shares * self.n_ranks * self.makespan_ms).rename("rank_ms")

    def _shares(self, rows: pd.DataFrame) -> pd.Series:
        rows = rows.sort_values(["rank", "start_ms"], kind="stable")
        begin, end = rows["start_ms"].min(), rows["end_ms"].max()
        by_rank = rows.groupby("rank")
        previous_end = by_rank["end_ms"].shift()
        inner = previous_end.notna()
        free, start = previous_end[inner], rows["start_ms"][inner]
        made = input_ends(rows)[inner].clip(free, start).fillna(free)
        there = rows["ready_ms"][inner].fillna(made).clip(made, start)
        left = (start - there).sum()
        simulated = self.is_simulated  # it has no runtime: what is left is a blocking send
        total = {
            "compute": (rows["end_ms"] - rows["start_ms"]).sum(),
            "communication": (there - made).sum() + left * simulated,
            "dependency": (made - free).sum(),
            "fill": (by_rank["start_ms"].min() - begin).sum(),
            "drain": (end - by_rank["end_ms"].max()).sum(),
            "runtime": left * (not simulated),
        }
        shares: pd.Series = pd.Series(total)[list(BUDGET)] / (self.n_ranks * (end - begin))
        return shares


def _need_columns(frame: pd.DataFrame, names: Iterable[str]) -> None:
    missing = [name for name in names if name not in frame]
    if missing:
        raise TimelineError(
            f"a timeline needs the column(s) {missing}; given: {list(frame.columns)}. "
            f"Timeline.from_frame fills in all but {list(_REQUIRED)}."
        )


def input_ends(rows: pd.DataFrame) -> pd.Series:
    """When the producer of each action's last input ended, NaN for an action without inputs; one step."""
    ends = rows["end_ms"].to_numpy()
    latest = np.max([np.where(found >= 0, ends[found], -np.inf) for found in input_rows(rows)], axis=0)
    return pd.Series(np.where(np.isfinite(latest), latest, np.nan), index=rows.index)


def input_rows(rows: pd.DataFrame) -> list[npt.NDArray[np.int64]]:
    """Positions of the rows each action needs: neighbouring stage, neighbouring slice, own half; −1 for none.

    The rows are of one step. The rules are those of `schedule.graph`.
    """
    places = ["stage", "microbatch", "slice"]
    keys = rows[places].assign(half=np.where(rows["kind"] == "F", "F", np.where(rows["kind"] == "W", "W", "B")))
    index = pd.MultiIndex.from_frame(keys)
    forward, weight = (keys["half"] == "F").to_numpy(), (keys["half"] == "W").to_numpy()
    direction = np.where(forward, -1, 1)
    neighbour_stage = _find(index, keys.assign(stage=keys["stage"] + direction))
    neighbour_slice = _find(index, keys.assign(slice=keys["slice"] + direction))
    own = _find(index, keys.assign(half=np.where(weight, "B", "F")))
    return [
        np.where(weight, -1, neighbour_stage),
        np.where(weight, -1, neighbour_slice),
        np.where(forward, -1, own),
    ]


def _find(index: pd.MultiIndex, wanted: pd.DataFrame) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = index.get_indexer(pd.MultiIndex.from_frame(wanted)).astype(np.int64)
    return found


def name_blockers(rows: pd.DataFrame) -> Iterable[str]:
    """Text of the action that each one waited for last, the rows of one step in rank and start order."""
    texts = rows["stage"].astype(str) + rows["kind"] + rows["microbatch"].astype(str) + "." + rows["slice"].astype(str)
    ends = rows["end_ms"].to_numpy()
    blockers, latest = np.full(len(rows), -1), np.full(len(rows), -np.inf)
    same_rank = rows["rank"].to_numpy()[1:] == rows["rank"].to_numpy()[:-1]
    before = np.where(np.append(False, same_rank), np.arange(-1, len(rows) - 1), -1)
    for found in [*input_rows(rows), before]:
        end = np.where(found >= 0, ends[found], -np.inf)
        blockers, latest = np.where(end >= latest, found, blockers), np.maximum(latest, end)
    return [texts.iloc[blocker] if blocker >= 0 else "" for blocker in blockers]
