"""What each rank holds over time: the table of both back ends, and its peaks. Knows no model and no tensor.

A row is what a rank holds once an action has ended: a forward's unit counts from the forward's end, a
backward's goes with the backward's end. What an action needs only while it runs is in no row.
"""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from terapipe.cost.held import HELD_COLUMNS
from terapipe.errors import TimelineError

if TYPE_CHECKING:
    from terapipe.timeline.timeline import Timeline

MEMORY_COLUMNS = ["step", "rank", "time_ms", *HELD_COLUMNS]


def count_units(frame: pd.DataFrame) -> pd.DataFrame:
    """The table of a timeline whose bytes are not known: units, and NaN for every column of bytes."""
    rows = frame.sort_values(["step", "rank", "start_ms"], kind="stable")
    table = rows[["step", "rank"]].assign(time_ms=rows["end_ms"], units=count_held(rows))
    return table.reindex(columns=MEMORY_COLUMNS, fill_value=np.nan).reset_index(drop=True)


def count_held(rows: pd.DataFrame) -> pd.Series:
    """Units that each row's rank holds once its action has ended; the rows of a step's rank in the order they ran.

    Where nothing goes backward, nothing is kept: a rank then has one unit at a time.
    """
    if (rows["kind"] == "F").all():
        return pd.Series(1, index=rows.index)
    change = rows["kind"].map({"F": 1, "B": -1, "W": -1, "I": 0}).astype("int64")
    return change.groupby([rows["step"], rows["rank"]]).cumsum()


def find_peak_bytes(timeline: "Timeline") -> pd.Series:
    """Most bytes on each rank in measured steps; index = rank."""
    memory = timeline.memory
    if memory["total_bytes"].isna().any():
        raise TimelineError(
            "this timeline knows units, not bytes. Simulate with memory=MemoryModel(model, dtype), or run with "
            "RunSpec(…, measure_memory=True); peak_in_flight() counts units."
        )
    counted = memory[memory["step"] >= 0]
    counted = memory if counted.empty else counted
    return counted.groupby("rank")["total_bytes"].max().rename("peak_bytes").astype("int64")
