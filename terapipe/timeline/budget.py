"""Where the ranks' time went."""

from typing import TYPE_CHECKING

import pandas as pd

from terapipe.timeline.inputs import input_ends

if TYPE_CHECKING:
    from terapipe.timeline.timeline import Timeline

BUDGET = ("compute", "communication", "dependency", "fill", "drain", "runtime")


def find_budget(timeline: "Timeline") -> pd.Series:
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
    steps = [_shares(rows, timeline.n_ranks, timeline.is_simulated) for _, rows in timeline.measured.groupby("step")]
    shares = pd.concat(steps, axis=1).mean(axis=1)
    return (shares * timeline.n_ranks * timeline.makespan_ms).rename("rank_ms")


def _shares(rows: pd.DataFrame, n_ranks: int, simulated: bool) -> pd.Series:
    rows = rows.sort_values(["rank", "start_ms"], kind="stable")
    begin, end = rows["start_ms"].min(), rows["end_ms"].max()
    by_rank = rows.groupby("rank")
    previous_end = by_rank["end_ms"].shift()
    inner = previous_end.notna()
    free, start = previous_end[inner], rows["start_ms"][inner]
    made = input_ends(rows)[inner].clip(free, start).fillna(free)
    there = rows["ready_ms"][inner].fillna(made).clip(made, start)
    left = (start - there).sum()
    total = {
        "compute": (rows["end_ms"] - rows["start_ms"]).sum(),
        "communication": (there - made).sum() + left * simulated,
        "dependency": (made - free).sum(),
        "fill": (by_rank["start_ms"].min() - begin).sum(),
        "drain": (end - by_rank["end_ms"].max()).sum(),
        "runtime": left * (not simulated),
    }
    shares: pd.Series = pd.Series(total)[list(BUDGET)] / (n_ranks * (end - begin))
    return shares
