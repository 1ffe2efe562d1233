"""What held the step up: the action that each one waited for last, and the chain of them that ends last."""

from itertools import pairwise

import numpy as np
import pandas as pd

from terapipe.timeline.step import Step


def name_blockers(rows: pd.DataFrame) -> list[str]:
    """Text of the action that each one waited for last, "" for none; the rows of one step, in any order."""
    step = Step.read(rows)
    texts = _texts(step.rows)
    found = np.empty(len(rows), dtype=object)
    found[step.place] = [texts[blocker] if blocker >= 0 else "" for blocker in step.blocker]
    return list(found)


def find_path(rows: pd.DataFrame) -> pd.DataFrame:
    """`Timeline.critical_path` of one step's rows."""
    step = Step.read(rows)
    path = [int(step.rows["end_ms"].to_numpy(np.float64).argmax())]
    while step.blocker[path[-1]] >= 0:
        path.append(int(step.blocker[path[-1]]))
    path.reverse()
    texts = _texts(step.rows)
    chosen = step.rows.iloc[path]
    waited = [step.begin_ms, *chosen["end_ms"].iloc[:-1]]
    return chosen.assign(
        blocked_by=["", *(texts[index] for index in path[:-1])],
        gap_ms=chosen["start_ms"].to_numpy(np.float64) - waited,
        reason=["", *(_reason(step, before, after) for before, after in pairwise(path))],
    ).reset_index(drop=True)


def _reason(step: Step, before: int, after: int) -> str:
    if step.graph.rank[before] != step.graph.rank[after]:
        return "message"
    return "input" if before in step.graph.dependencies[after] else "order"


def _texts(rows: pd.DataFrame) -> list[str]:
    texts = rows["stage"].astype(str) + rows["kind"] + rows["microbatch"].astype(str) + "." + rows["slice"].astype(str)
    return texts.tolist()
