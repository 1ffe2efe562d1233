"""What each row of a timeline needed, found from the table alone. The rules are those of `schedule.graph`."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd


def input_ends(rows: pd.DataFrame) -> pd.Series:
    """When the producer of each action's last input ended, NaN for an action without inputs; one step."""
    ends = rows["end_ms"].to_numpy()
    latest = np.max([np.where(found >= 0, ends[found], -np.inf) for found in input_rows(rows)], axis=0)
    return pd.Series(np.where(np.isfinite(latest), latest, np.nan), index=rows.index)


def input_rows(rows: pd.DataFrame) -> list[npt.NDArray[np.int64]]:
    """Positions of the rows each action needs: neighbouring stage, neighbouring slice, own half; −1 for none.

    The rows are of one step.
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
