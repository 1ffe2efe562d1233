"""A cost model or a profile as what a figure draws: lines, the points they rest on, and where both come from.

Knows no plotly.
"""

import reprlib
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.cost import CostModel, LinearContextCost, Profile, RooflineCost, StageShare, TableCost, TransferCost
from terapipe.errors import CostError

CostLike = CostModel | Profile
Floats = npt.NDArray[np.float64]
_TABLE = "table, linear between points"
_POINT = ["slice_tokens", "context_tokens", "forward_ms", "backward_ms"]


class DrawnCost(NamedTuple):
    """What one panel shows; times are of `n_sequences` sequences."""

    cost: CostModel
    n_sequences: int
    origin: str  # of the lines; its first word colours the badge
    points: pd.DataFrame  # measured or tabulated, with the columns of _POINT; may be empty
    origin_of_points: str = ""
    seq_tokens: int | None = None  # as far as it reaches

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Slice lengths at which something is known."""
        inner = _unwrapped(self.cost)
        known = inner.slice_tokens if isinstance(inner, LinearContextCost) else ()
        found: npt.NDArray[np.int64] = np.union1d(self.points["slice_tokens"], known).astype(np.int64)
        return found

    def times_ms(self, kind: str, slice_tokens: npt.NDArray[np.int64], context_tokens: int) -> Floats:
        """Times of slices behind one context; NaN where the cost model refuses to answer or forbids the slice."""
        function = getattr(self.cost, f"{kind}_ms")
        try:
            times = np.asarray(function(slice_tokens, context_tokens, self.n_sequences), dtype=np.float64)
        except CostError:  # one refused question refuses them all
            times = np.full(len(slice_tokens), np.nan)
            for place, length in enumerate(slice_tokens.tolist()):
                with suppress(CostError):
                    times[place] = function(length, context_tokens, self.n_sequences)
        return np.where(np.isfinite(times), times, np.nan)

    def is_extrapolated(self, slice_tokens: npt.NDArray[np.int64], context_tokens: int) -> npt.NDArray[np.bool_]:
        """Whether each of those times lies beyond what was measured."""
        answers: npt.NDArray[np.bool_] = self.cost.is_extrapolated(slice_tokens, context_tokens, self.n_sequences)
        return answers


def drawn_cost(given: object, n_sequences: int) -> DrawnCost:
    """A cost model or a profile, ready to draw.

    Raises
    ------
    CostError
        For anything else, for a profile without that number of sequences, and for a table that does not reach it.
    """
    if isinstance(given, Profile):
        return _of_profile(given, n_sequences)
    if isinstance(given, TableCost):
        return _of_table(given, n_sequences)
    if isinstance(given, CostModel):
        nothing = pd.DataFrame(columns=_POINT, dtype=np.float64)
        return DrawnCost(given, n_sequences, _origin(given), nothing, seq_tokens=_known_seq_tokens(_unwrapped(given)))
    raise CostError(f"{reprlib.repr(given)} is not a cost; give a CostModel, a Profile, or {{name: either}}.")


def _of_table(table: TableCost, n_sequences: int) -> DrawnCost:
    known = table.frame["n_sequences"]
    answers = table.extrapolate or known.min() <= n_sequences <= known.max()
    # Between and beyond its numbers of sequences a table has lines, but no points.
    points = table.frame[known == n_sequences] if answers else _with_sequences(table.frame, n_sequences)
    return DrawnCost(table, n_sequences, _TABLE, points[_POINT], "table", _reach(table.frame if points.empty else points))


def _of_profile(profile: Profile, n_sequences: int) -> DrawnCost:
    chosen = Profile(_with_sequences(profile.frame, n_sequences), profile.about)
    points = chosen.medians()
    stages = f", mean of {chosen.n_stages} stages" if chosen.n_stages > 1 else ""
    measured = f"measured, {repeats_text(chosen)}{stages}"
    cost: CostModel
    try:
        cost, lines = chosen.fit(), "fitted, eq. (9)"
    except CostError:  # too few points behind a context
        cost, lines = chosen.table(), "measured, linear between points"
    return DrawnCost(cost, n_sequences, lines, points[_POINT], measured, _reach(points))


def repeats_text(profile: Profile, stage: int | None = None) -> str:
    """How often each point of a profile was measured, on ranks that were alone: "9 repeats", or "5…9 repeats"."""
    rows = profile.frame[~profile.frame["together"]]
    rows = rows if stage is None else rows[rows["stage"] == stage]
    counts = rows.groupby(["stage", "slice_tokens", "context_tokens", "n_sequences"]).size()
    low, high = int(counts.min()), int(counts.max())
    return f"{low}{f'…{high}' if high > low else ''} repeat{'s' * (high > 1)}"


def _with_sequences(frame: pd.DataFrame, n_sequences: int) -> pd.DataFrame:
    rows = frame[frame["n_sequences"] == n_sequences]
    if rows.empty:
        known = sorted({int(each) for each in frame["n_sequences"]})
        raise CostError(f"n_sequences={n_sequences!r} is not among the points; there are {known}.")
    return rows


def _reach(points: pd.DataFrame) -> int:
    return int((points["slice_tokens"] + points["context_tokens"]).max())


def _unwrapped(cost: CostModel) -> CostModel:
    """The cost of compute, of a whole stage."""
    return _unwrapped(cost.cost) if isinstance(cost, TransferCost | StageShare) else cost


def _known_seq_tokens(cost: CostModel) -> int | None:
    if isinstance(cost, TableCost):
        return _reach(cost.frame)
    if isinstance(cost, RooflineCost):
        return cost.model.max_seq_tokens
    return max(cost.slice_tokens[-1], cost.seq_tokens or 0) if isinstance(cost, LinearContextCost) else None


def _origin(cost: CostModel) -> str:
    if isinstance(cost, TransferCost):
        return f"{_origin(cost.cost)}, with messages"
    if isinstance(cost, StageShare):
        return f"{_origin(cost.cost)}, ÷ {cost.n_parts}"
    if isinstance(cost, RooflineCost):
        return "formula, a lower bound"
    if isinstance(cost, TableCost):
        return _TABLE
    return "fitted, eq. (9)" if isinstance(cost, LinearContextCost) else "formula"
