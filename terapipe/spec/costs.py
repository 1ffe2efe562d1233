"""What an emulated run's cost models say of the slices that it visits: all that its ranks need of them."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from terapipe.cost import CostModel, TableCost
from terapipe.cost.model import Numbers, Times
from terapipe.slicing import Slicing


def visited_costs(slicings: Sequence[Slicing], stage_costs: Sequence[CostModel]) -> pd.DataFrame:
    """One row a stage and visited point: stage, slice_tokens, context_tokens, n_sequences, the times, extrapolated."""
    units = np.unique(np.concatenate([slicing.units[:, 2:] for slicing in slicings]), axis=0)
    names = ("forward_ms", "backward_ms", "input_ms", "weight_ms")
    tables = []
    for stage, cost in enumerate(stage_costs):
        point = {"stage": stage, "slice_tokens": units[:, 0], "context_tokens": units[:, 1], "n_sequences": units[:, 2]}
        times = {name: getattr(cost, name)(*units.T) for name in names}
        tables.append(pd.DataFrame(point | times | {"extrapolated": cost.is_extrapolated(*units.T)}))
    return pd.concat(tables, ignore_index=True)


class VisitedCost(TableCost):
    """The points that a run visits, as `visited_costs` lists them: they stay extrapolated if they were."""

    def __init__(self, frame: pd.DataFrame) -> None:
        super().__init__(frame)
        beyond = frame[frame["extrapolated"]] if "extrapolated" in frame else frame[:0]
        self._beyond = beyond[["slice_tokens", "context_tokens", "n_sequences"]].to_numpy()

    def is_extrapolated(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Whether each answer lies beyond what was measured, as the run's own cost model said."""
        found = np.asarray(super().is_extrapolated(slice_tokens, context_tokens, n_sequences))
        for length, context, sequences in self._beyond:
            found = found | ((slice_tokens == length) & (context_tokens == context) & (n_sequences == sequences))
        return found[()]
