"""A cost model from a table of measured or invented times."""

from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.cost.model import CostModel, Numbers, Times
from terapipe.errors import CostError

_KEYS = ["slice_tokens", "context_tokens", "n_sequences"]
_TIMES = ["forward_ms", "backward_ms"]


class TableCost(CostModel):
    """Costs read off a table; between its points linear, beyond them refused.

    A point of the table is returned as it stands. Elsewhere: for each number of sequences in the
    table, linear interpolation over the Delaunay triangles of its (slice, context) points, then
    linear between the two neighbouring numbers of sequences. Nothing is extrapolated.

    Parameters
    ----------
    frame : DataFrame
        Columns slice_tokens, context_tokens, forward_ms, backward_ms, and if they are known
        n_sequences (default 1) and weight_ms (default half of backward_ms). One row a point.

    Raises
    ------
    CostError
        For missing columns, repeated points, NaN or negative times; on a question outside the table.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        frame = frame.assign(n_sequences=1) if "n_sequences" not in frame else frame
        missing = [name for name in [*_KEYS, *_TIMES] if name not in frame]
        if missing:
            raise CostError(f"a cost table needs the column(s) {missing}; given: {list(frame.columns)}.")
        if frame.empty:
            raise CostError("a cost table needs at least one row.")
        if "weight_ms" not in frame:
            frame = frame.assign(weight_ms=frame["backward_ms"] / 2)
        frame = frame[[*_KEYS, *_TIMES, "weight_ms"]].reset_index(drop=True)
        if frame.duplicated(_KEYS).any():
            row = frame[frame.duplicated(_KEYS)].iloc[0]
            raise CostError(f"the cost table has the point {row[_KEYS].to_dict()} twice; take the median of repeats first.")
        times = frame[[*_TIMES, "weight_ms"]]
        if times.isna().to_numpy().any() or (times < 0).to_numpy().any():
            row = frame[times.isna().any(axis=1) | (times < 0).any(axis=1)].iloc[0]
            raise CostError(f"the cost table has a time that is NaN or negative: {row.to_dict()}.")
        self.frame = frame

    def forward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the forward, interpolated."""
        return self._look_up("forward_ms", slice_tokens, context_tokens, n_sequences)

    def backward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the full backward, interpolated."""
        return self._look_up("backward_ms", slice_tokens, context_tokens, n_sequences)

    def weight_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the weight-gradient half, interpolated."""
        return self._look_up("weight_ms", slice_tokens, context_tokens, n_sequences)

    @cached_property
    def _index(self) -> pd.MultiIndex:
        return pd.MultiIndex.from_frame(self.frame[_KEYS])

    def _look_up(self, column: str, *point: Numbers) -> Times:
        columns = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in point))
        flat = [value.ravel() for value in columns]
        rows = self._index.get_indexer(pd.MultiIndex.from_arrays(flat, names=_KEYS))
        times = np.where(rows >= 0, self.frame[column].to_numpy(dtype=np.float64)[rows], np.nan)
        between = np.flatnonzero(rows < 0)
        if len(between):
            times[between] = self._interpolate(column, *(value[between] for value in flat))
        if np.isnan(times).any():
            where = int(np.flatnonzero(np.isnan(times))[0])
            ranges = {key: f"{self.frame[key].min()}…{self.frame[key].max()}" for key in _KEYS}
            raise CostError(
                f"the cost table does not reach slice_tokens={flat[0][where]:g}, context_tokens={flat[1][where]:g}, "
                f"n_sequences={flat[2][where]:g}; it covers {ranges}. Measure further, or restrict the slices "
                "(granularity_tokens, min_slice_tokens)."
            )
        return times.reshape(columns[0].shape)[()]

    def _interpolate(
        self,
        column: str,
        slices: npt.NDArray[np.float64],
        contexts: npt.NDArray[np.float64],
        sequences: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """Linear between measured points; NaN beyond them."""
        known = np.unique(self.frame["n_sequences"].to_numpy(dtype=np.float64))
        above = np.clip(np.searchsorted(known, sequences), 0, len(known) - 1)
        below = np.where(known[above] == sequences, above, np.maximum(above - 1, 0))
        planes = np.full((len(known), len(slices)), np.nan)
        for plane in np.unique(np.concatenate([above, below])):
            planes[plane] = self._interpolate_plane(column, known[plane], slices, contexts)
        low, high = known[below], known[above]
        share = np.divide(sequences - low, high - low, out=np.zeros_like(sequences), where=high > low)
        at = np.arange(len(slices))
        mixed = share > 0  # elsewhere one plane answers alone: 0 × an infinite time is not 0
        times = planes[below, at]
        times[mixed] = times[mixed] * (1 - share[mixed]) + planes[above, at][mixed] * share[mixed]
        return np.where((sequences < known[0]) | (sequences > known[-1]), np.nan, times)

    def _interpolate_plane(
        self, column: str, n_sequences: float, slices: npt.NDArray[np.float64], contexts: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        from scipy.interpolate import LinearNDInterpolator, interp1d

        plane = self.frame[self.frame["n_sequences"] == n_sequences]
        points = plane[["slice_tokens", "context_tokens"]].to_numpy(dtype=np.float64)
        times = plane[column].to_numpy(dtype=np.float64)
        vary = [axis for axis in (0, 1) if np.ptp(points[:, axis]) > 0]
        wanted = np.stack([slices, contexts], axis=1)
        if len(vary) == 2 and np.linalg.matrix_rank(points - points[0]) == 2:
            result: npt.NDArray[np.float64] = LinearNDInterpolator(points, times, rescale=True)(wanted)
            return result
        # All points on one axis: a line, valid only along it.
        along = vary[0] if len(vary) == 1 else None
        if along is None:
            return np.full(len(slices), np.nan)
        on_line = wanted[:, 1 - along] == points[0, 1 - along]
        line = interp1d(points[:, along], times, bounds_error=False, fill_value=np.nan)(wanted[:, along])
        return np.where(on_line, line, np.nan)
