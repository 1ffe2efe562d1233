"""Times over the plane of (slice, context): as measured at its points, linear between, fitted beyond.

Knows one number of sequences; `cost.table` puts several such planes together.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from terapipe.cost.linear import Coefficients, context_features, fit_plane, plane_ms
from terapipe.errors import CostError

Floats = npt.NDArray[np.float64]


class Plane:
    """Measured points (slice, context), each with a time of every kind.

    Parameters
    ----------
    points : array (n, 2)
        Slice and context lengths in tokens, every point once.
    times_ms : {kind: array (n,)}
        Infinity forbids a slice, and all that lies between it and its neighbours.
    """

    def __init__(self, points: Floats, times_ms: Mapping[str, Floats]) -> None:
        self.points, self.times_ms = points, times_ms
        self.lengths, self.contexts = np.unique(points[:, 0]), np.unique(points[:, 1])
        codes = self._codes(np.searchsorted(self.lengths, points[:, 0]), np.searchsorted(self.contexts, points[:, 1]))
        self.by_code = np.argsort(codes)
        self.codes = codes[self.by_code]
        self.interpolators: dict[str, Any] = {}
        self.fits: dict[str, Coefficients] = {}

    def within_ms(self, kind: str, slices: Floats, contexts: Floats) -> Floats:
        """Times at points and between them (both arrays of one dimension); NaN beyond."""
        times = self._between(kind, slices, contexts)
        at, rows = self._measured(slices, contexts)
        times[at] = self.times_ms[kind][rows]
        return times

    def fitted_ms(self, kind: str, slices: Floats, contexts: Floats) -> Floats:
        """Times fitted to all points whose time is finite, at least 0: 1, l, c and l·(c + l/2).

        The last are the tokens that a causal slice attends to, c + l/2 for each of its own on average.

        Raises
        ------
        CostError
            Where the points do not determine its four numbers.
        """
        if kind not in self.fits:
            finite = np.isfinite(self.times_ms[kind])
            lengths, before = self.points[finite].T
            seen = before + lengths / 2
            if np.linalg.matrix_rank(context_features(lengths, seen)) < 4:
                raise CostError(
                    f"extrapolate=True: {finite.sum()} points of the cost table do not determine 1, l, c and l·(c + l/2). "
                    "Measure two slice lengths or more, each behind two contexts or more."
                )
            times = self.times_ms[kind][finite]
            self.fits[kind] = fit_plane(lengths, seen, times, times)
        return np.maximum(plane_ms(self.fits[kind], slices, contexts + slices / 2), 0.0)

    def _codes(self, length_index: npt.NDArray[np.int64], context_index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return length_index * len(self.contexts) + context_index

    def _measured(self, slices: Floats, contexts: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which questions are points of the table, and which."""
        length_index = np.minimum(np.searchsorted(self.lengths, slices), len(self.lengths) - 1)
        at = np.flatnonzero(self.lengths[length_index] == slices)  # most questions end here: a table is coarse
        context_index = np.minimum(np.searchsorted(self.contexts, contexts[at]), len(self.contexts) - 1)
        same = self.contexts[context_index] == contexts[at]
        at, codes = at[same], self._codes(length_index[at][same], context_index[same])
        found = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        known = self.codes[found] == codes
        return at[known], self.by_code[found[known]]

    @cached_property
    def _scale(self) -> Floats:
        """Both lengths range over 1 in the triangulation, so that its triangles do not depend on the unit."""
        ranges = np.ptp(self.points, axis=0)
        return np.where(ranges > 0, ranges, 1.0)

    @cached_property
    def _triangles(self) -> Any:
        """The Delaunay triangulation; None where all points lie on one line."""
        from scipy.spatial import Delaunay

        scaled = self.points / self._scale
        return Delaunay(scaled) if np.linalg.matrix_rank(scaled - scaled[0]) == 2 else None

    def _between(self, kind: str, slices: Floats, contexts: Floats) -> Floats:
        if self._triangles is None:
            return self._along_line(kind, slices, contexts)
        times = self.times_ms[kind]
        finite = np.isfinite(times)
        wanted = np.stack([slices / self._scale[0], contexts / self._scale[1]], axis=1)
        # Interpolated apart, as infinity × a weight of 0 is no time.
        result = self._interpolate(kind, np.where(finite, times, 0.0), wanted)
        if not finite.all():
            result[self._interpolate(f"{kind}, forbidden", (~finite).astype(np.float64), wanted) > 1e-9] = np.inf
        return result

    def _interpolate(self, name: str, values: Floats, wanted: Floats) -> Floats:
        from scipy.interpolate import LinearNDInterpolator

        if name not in self.interpolators:
            self.interpolators[name] = LinearNDInterpolator(self._triangles, values)
        result: Floats = self.interpolators[name](wanted)
        return result

    def _along_line(self, kind: str, slices: Floats, contexts: Floats) -> Floats:
        """Points on one axis-parallel line are interpolated along it; elsewhere nothing is known but the points."""
        vary = np.flatnonzero(np.ptp(self.points, axis=0) > 0)
        result = np.full(len(slices), np.nan)
        if len(vary) != 1:
            return result
        along, across = (slices, contexts) if vary[0] == 0 else (contexts, slices)
        order = np.argsort(self.points[:, vary[0]])
        knots, times = self.points[order, vary[0]], self.times_ms[kind][order]
        on_line = (across == self.points[0, 1 - vary[0]]) & (along >= knots[0]) & (along <= knots[-1])
        result[on_line] = np.interp(along[on_line], knots, times)
        return result
