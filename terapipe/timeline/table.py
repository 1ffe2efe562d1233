"""What a timeline's table must have: its columns, and what is filled in."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from terapipe.errors import TimelineError
from terapipe.timeline.path import name_blockers

COLUMNS = [
    *("source", "step", "rank", "stage", "kind", "microbatch", "slice"),
    *("n_sequences", "slice_tokens", "context_tokens"),
    *("start_ms", "end_ms", "ready_ms", "blocked_by", "n_bytes"),
]
REQUIRED = ("rank", "kind", "microbatch", "slice", "start_ms", "end_ms")
_KINDS = ("F", "B", "I", "W")


def fill_in(frame: pd.DataFrame) -> pd.DataFrame:
    """`Timeline.from_frame`'s table."""
    _need_columns(frame, REQUIRED)
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
    table = check_table(ordered[COLUMNS].reset_index(drop=True))
    return table if "blocked_by" in frame else table.assign(blocked_by=_find_blockers(table))


def check_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The table itself, if every column is there and every time is possible."""
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


def _find_blockers(frame: pd.DataFrame) -> pd.Series:
    """`blocked_by` of a table without it; nothing where an action is in a step twice."""
    try:
        named = [pd.Series(name_blockers(rows), index=rows.index) for _, rows in frame.groupby("step")]
    except TimelineError:
        return frame["blocked_by"]
    return pd.concat(named)


def _need_columns(frame: pd.DataFrame, names: Iterable[str]) -> None:
    missing = [name for name in names if name not in frame]
    if missing:
        raise TimelineError(
            f"a timeline needs the column(s) {missing}; given: {list(frame.columns)}. "
            f"Timeline.from_frame fills in all but {list(REQUIRED)}."
        )
