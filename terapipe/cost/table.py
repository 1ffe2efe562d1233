"""A cost model from a table of measured or invented times."""

import reprlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.cost.model import CostModel, Numbers, Times
from terapipe.cost.plane import Floats, Plane
from terapipe.errors import CostError

_KEYS = ["slice_tokens", "context_tokens", "n_sequences"]
_LEAST = {"slice_tokens": 1, "context_tokens": 0, "n_sequences": 1}
_TIMES = ["forward_ms", "backward_ms"]
_ALL_TIMES = [*_TIMES, "weight_ms"]
_INPUT = "input_ms"  # where it was measured: else it is the rest of the backward


class TableCost(CostModel):
    """Costs read off a table; between its points linear, beyond them refused, or extrapolated on request.

    A point of the table is returned as it stands. Elsewhere: for each number of sequences in the
    table, linear interpolation over the Delaunay triangles of its (slice, context) points, then
    linear between the two neighbouring numbers of sequences.

    With extrapolate=True a question beyond the triangles is answered by 1, l, c and l·(c + l/2), the
    tokens a causal slice attends to, fitted to all finite times of that number of sequences with the
    least squared relative error, and at least 0; numbers of sequences beyond the table are in
    proportion to the nearest one in it. `is_extrapolated` tells such answers from the others.

    Parameters
    ----------
    frame : DataFrame
        Columns slice_tokens, context_tokens, forward_ms, backward_ms, and if they are known
        n_sequences (default 1), weight_ms (default half of backward_ms) and input_ms (default
        backward_ms − weight_ms). One row a point.
    extrapolate : bool
        Whether questions beyond the table are answered.

    Raises
    ------
    CostError
        For missing columns, points that are repeated or no slices, times that are NaN, negative or, of the
        weights without input_ms, longer than the backward; on a question outside the table.
    """

    def __init__(self, frame: pd.DataFrame, extrapolate: bool = False) -> None:
        if not isinstance(frame, pd.DataFrame):
            raise CostError(
                f"frame={reprlib.repr(frame)}: needs a DataFrame. TableCost.read_csv(path) reads a file; "
                "of columns, use TableCost(pd.DataFrame({name: values}))."
            )
        frame = frame.assign(n_sequences=1) if "n_sequences" not in frame else frame
        missing = [name for name in [*_KEYS, *_TIMES] if name not in frame]
        if missing:
            raise CostError(f"a cost table needs the column(s) {missing}; given: {list(frame.columns)}.")
        if frame.empty:
            raise CostError("a cost table needs at least one row.")
        if "weight_ms" not in frame:
            frame = frame.assign(weight_ms=_as_numbers(frame, "backward_ms") / 2)
        self._times = [*_ALL_TIMES, *(name for name in [_INPUT] if name in frame)]
        names = [*_KEYS, *self._times]
        frame = pd.DataFrame({name: _as_numbers(frame, name) for name in names}).reset_index(drop=True)
        if frame.duplicated(_KEYS).any():
            row = frame[frame.duplicated(_KEYS)].iloc[0]
            raise CostError(
                f"the cost table has the point {row[_KEYS].to_dict()} twice; take the median of repeats first "
                "(of a profile: Profile.load(path).table())."
            )
        times = frame[self._times]
        if times.isna().to_numpy().any() or (times < 0).to_numpy().any():
            row = frame[times.isna().any(axis=1) | (times < 0).any(axis=1)].iloc[0]
            raise CostError(f"the cost table has a time that is NaN or negative: {row.to_dict()}.")
        if not np.isfinite(frame[_KEYS].to_numpy(np.float64)).all():
            row = frame[~np.isfinite(frame[_KEYS].to_numpy(np.float64)).all(axis=1)].iloc[0]
            raise CostError(f"the cost table has a point that is no number: {row.to_dict()}.")
        for name, least in _LEAST.items():
            if (frame[name] < least).any():
                row = frame[frame[name] < least].iloc[0]
                raise CostError(f"the cost table has a point with {name} below {least}: {row.to_dict()}. Leave it out.")
        if _INPUT not in frame and (frame["weight_ms"] > frame["backward_ms"]).any():
            row = frame[frame["weight_ms"] > frame["backward_ms"]].iloc[0]
            raise CostError(
                f"the cost table has a weight_ms longer than its backward_ms: {row.to_dict()}. The weight gradients are a part "
                "of the backward; leave the column out where they are not known, or give input_ms too where both halves are."
            )
        self.frame, self.extrapolate = frame, extrapolate
        numbers = sorted(map(float, frame["n_sequences"].unique()))
        self._planes = {n: _plane(frame[frame["n_sequences"] == n], self._times) for n in numbers}

    @classmethod
    def read_csv(cls, path: str | Path, extrapolate: bool = False) -> "TableCost":
        """The table in a CSV file with the constructor's columns, one row a point.

        Raises
        ------
        CostError
            Where there is no such file, it is no table, or a cell is no number.
        """
        if not Path(path).is_file():
            raise CostError(
                f"{str(path)!r}: no such file. A cost table is a CSV with the columns {', '.join([*_KEYS, *_TIMES])}."
            )
        try:
            frame = pd.read_csv(path)
        except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
            raise CostError(f"{str(path)!r} is no CSV table: {error}.") from None
        try:
            return cls(frame, extrapolate)
        except CostError as error:
            raise CostError(f"{str(path)!r}: {error}") from None

    def forward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the forward, interpolated."""
        return self._look_up("forward_ms", slice_tokens, context_tokens, n_sequences)

    def backward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the full backward, interpolated."""
        return self._look_up("backward_ms", slice_tokens, context_tokens, n_sequences)

    def weight_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the weight-gradient half, interpolated."""
        return self._look_up("weight_ms", slice_tokens, context_tokens, n_sequences)

    def input_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the input-gradient half, interpolated; backward minus weight where the table has none."""
        if _INPUT not in self._times:
            return super().input_ms(slice_tokens, context_tokens, n_sequences)
        return self._look_up(_INPUT, slice_tokens, context_tokens, n_sequences)

    def is_extrapolated(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Whether each answer lies beyond the table: np.bool_, or an array of them."""
        _, beyond, shape = self._answer("forward_ms", False, slice_tokens, context_tokens, n_sequences)
        return beyond.reshape(shape)[()]

    def _look_up(self, kind: str, *point: Numbers) -> Times:
        times, beyond, shape = self._answer(kind, self.extrapolate, *point)
        if not self.extrapolate and beyond.any():
            where = int(beyond.argmax())
            at = ", ".join(
                f"{key}={np.broadcast_to(value, shape).flat[where]:g}" for key, value in zip(_KEYS, point, strict=True)
            )
            ranges = {key: f"{self.frame[key].min()}…{self.frame[key].max()}" for key in _KEYS}
            raise CostError(
                f"the cost table does not reach {at}; it covers {ranges}. Measure further, restrict the slices "
                "(granularity_tokens, min_slice_tokens), or use TableCost(…, extrapolate=True), which figures then show."
            )
        return times.reshape(shape)[()]

    def _answer(self, kind: str, fill: bool, *point: Numbers) -> tuple[Floats, npt.NDArray[np.bool_], tuple[int, ...]]:
        """Flat times, where they lie beyond the table (NaN there unless `fill`), and the shape they belong in."""
        slices, contexts, sequences = (np.asarray(value, dtype=np.float64) for value in point)
        shape = np.broadcast_shapes(slices.shape, contexts.shape, sequences.shape)
        lengths, before = (np.broadcast_to(value, shape).ravel() for value in (slices, contexts))
        asked = np.unique(sequences)
        if len(asked) == 1:
            return *self._at(kind, fill, float(asked[0]), lengths, before), shape
        times, beyond = np.empty(len(lengths)), np.empty(len(lengths), dtype=bool)
        wide = np.broadcast_to(sequences, shape).ravel()
        for n_sequences in asked.tolist():
            here = wide == n_sequences
            times[here], beyond[here] = self._at(kind, fill, n_sequences, lengths[here], before[here])
        return times, beyond, shape

    def _at(
        self, kind: str, fill: bool, n_sequences: float, slices: Floats, contexts: Floats
    ) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Times at one number of sequences, and where they lie beyond the table."""
        known = np.fromiter(self._planes, dtype=np.float64)
        nearest = float(np.clip(n_sequences, known[0], known[-1]))
        low, high = float(known[known <= nearest][-1]), float(known[known >= nearest][0])
        times, beyond = self._on_plane(kind, fill, low, slices, contexts)
        if high > low:
            others, beyond_others = self._on_plane(kind, fill, high, slices, contexts)
            share = (nearest - low) / (high - low)
            times, beyond = times * (1 - share) + others * share, beyond | beyond_others
        if nearest != n_sequences:
            times, beyond = times * (n_sequences / nearest), np.ones(len(slices), dtype=bool)
        return times, beyond

    def _on_plane(
        self, kind: str, fill: bool, n_sequences: float, slices: Floats, contexts: Floats
    ) -> tuple[Floats, npt.NDArray[np.bool_]]:
        plane = self._planes[n_sequences]
        times = plane.within_ms(kind, slices, contexts)
        beyond = np.isnan(times)
        if fill and beyond.any():
            times[beyond] = plane.fitted_ms(kind, slices[beyond], contexts[beyond])
        return times, beyond


def _plane(rows: pd.DataFrame, times: Sequence[str]) -> Plane:
    return Plane(rows[_KEYS[:2]].to_numpy(np.float64), {name: rows[name].to_numpy(np.float64) for name in times})


def _as_numbers(frame: pd.DataFrame, name: str) -> "pd.Series[float]":
    """A column as numbers; a cell that is something else is refused, where NaN is left to be refused as a time."""
    numbers = pd.to_numeric(frame[name], errors="coerce")
    wrong = numbers.isna() & frame[name].notna()
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise CostError(f"the cost table has {frame[name].iloc[row]!r} for {name} in row {row}; it needs a number.")
    return numbers
