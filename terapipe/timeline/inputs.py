"""What each row of a timeline needed, found from the table alone. The rules are those of `schedule.graph`."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.errors import TimelineError


def input_ends(rows: pd.DataFrame) -> pd.Series:
    """When the producer of each action's last input ended, NaN for an action without inputs; one step."""
    ends = rows["end_ms"].to_numpy()
    latest = np.max([np.where(found >= 0, ends[found], -np.inf) for found in input_rows(rows)], axis=0)
    return pd.Series(np.where(np.isfinite(latest), latest, np.nan), index=rows.index)


def input_rows(rows: pd.DataFrame) -> list[npt.NDArray[np.int64]]:
    """Positions of the rows each action needs: neighbouring stage, neighbouring slice, own half; −1 for none.

    The rows are of one step.

    Raises
    ------
    TimelineError
        Where an action is there twice, or a slice has B beside I.
    """
    places = ["stage", "microbatch", "slice"]
    keys = rows[places].assign(half=np.where(rows["kind"] == "F", "F", np.where(rows["kind"] == "W", "W", "B")))
    index = pd.MultiIndex.from_frame(keys)
    if not index.is_unique:
        twice = rows[index.duplicated(keep=False)].sort_values(places, kind="stable")[["rank", *places, "kind", "start_ms"]]
        raise TimelineError(
            f"an action is in a step twice, or a backward beside its own half: {twice.iloc[:2].to_dict('records')}. "
            "Give repeats of a step a column `step`."
        )
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
