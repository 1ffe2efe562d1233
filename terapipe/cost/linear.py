"""The paper's performance model, eq. (9): a slice's own time plus a context part that is linear."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terapipe.cost.model import CostModel, Numbers, Times, as_times
from terapipe.errors import CostError

Coefficients = tuple[float, float, float, float]


@dataclass(frozen=True)
class LinearContextCost(CostModel):
    """t(l, c) = t(l, 0) + t_ctx(l, c), with t_ctx(l, c) = a0 + a1·l + a2·c + a3·l·c and t_ctx(l, 0) = 0.

    TeraPipe (ICML 2021), eq. (9), for forward and backward apart. t(l, 0) is linear between the
    measured lengths and refused beyond them. A negative sum counts as 0.

    Parameters
    ----------
    slice_tokens : tuple of int
        Lengths l at which t(l, 0) is known, ascending.
    forward_alone_ms, backward_alone_ms : tuple of float
        t(l, 0) at those lengths.
    forward_context, backward_context : tuple of 4 floats
        a0, a1, a2, a3 in milliseconds, per token, per token, per token².
    n_sequences : int
        Sequences in the microbatch it was measured with. Other numbers scale in proportion, which
        overstates the cost of many sequences where short slices leave the device idle.
    """

    slice_tokens: tuple[int, ...]
    forward_alone_ms: tuple[float, ...]
    backward_alone_ms: tuple[float, ...]
    forward_context: Coefficients = (0.0, 0.0, 0.0, 0.0)
    backward_context: Coefficients = (0.0, 0.0, 0.0, 0.0)
    n_sequences: int = 1

    def __post_init__(self) -> None:
        if not self.slice_tokens or list(self.slice_tokens) != sorted(set(self.slice_tokens)):
            raise CostError(f"slice_tokens={self.slice_tokens}: needs distinct lengths in ascending order.")
        for name in ("forward_alone_ms", "backward_alone_ms"):
            if len(getattr(self, name)) != len(self.slice_tokens):
                raise CostError(f"{name} has {len(getattr(self, name))} values for {len(self.slice_tokens)} lengths.")
            as_times(np.asarray(getattr(self, name)), np.asarray(self.slice_tokens))
        if self.n_sequences < 1:
            raise CostError(f"n_sequences={self.n_sequences}: needs at least 1.")

    def forward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the forward by eq. (9)."""
        return self._time(self.forward_alone_ms, self.forward_context, slice_tokens, context_tokens, n_sequences)

    def backward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the full backward by eq. (9)."""
        return self._time(self.backward_alone_ms, self.backward_context, slice_tokens, context_tokens, n_sequences)

    def _time(
        self, alone_ms: tuple[float, ...], context: Coefficients, slices: Numbers, contexts: Numbers, sequences: Numbers
    ) -> Times:
        lengths, before = np.asarray(slices, dtype=np.float64), np.asarray(contexts, dtype=np.float64)
        low, high = self.slice_tokens[0], self.slice_tokens[-1]
        if lengths.size and (lengths.min() < low or lengths.max() > high):
            wrong = lengths.min() if lengths.min() < low else lengths.max()
            raise CostError(
                f"a slice of {wrong:g} tokens is outside the measured {low}…{high}. Measure that length too, "
                "or restrict the slices (granularity_tokens, min_slice_tokens)."
            )
        behind = np.where(before > 0, plane_ms(context, lengths, before), 0.0)
        times = np.maximum(np.interp(lengths, self.slice_tokens, alone_ms) + behind, 0.0)
        if np.ndim(sequences) or sequences != self.n_sequences:
            times = times * (np.asarray(sequences, dtype=np.float64) / self.n_sequences)
        return as_times(times, slices, contexts, sequences)


def plane_ms(
    coefficients: Coefficients, slice_tokens: npt.NDArray[np.float64], context_tokens: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """a0 + a1·l + a2·c + a3·l·c, without the array of features: the slicing DP asks for millions of points."""
    a0, a1, a2, a3 = coefficients
    return (a0 + a1 * slice_tokens) + context_tokens * (a2 + a3 * slice_tokens)


def context_features(slice_tokens: npt.NDArray[np.float64], context_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The features 1, l, c, l·c of eq. (9) in a last axis of four."""
    lengths, before = np.broadcast_arrays(slice_tokens, context_tokens)
    return np.stack([np.ones_like(lengths), lengths, before, lengths * before], axis=-1)


def fit_plane(
    slice_tokens: npt.NDArray[np.float64],
    context_tokens: npt.NDArray[np.float64],
    part_ms: npt.NDArray[np.float64],
    total_ms: npt.NDArray[np.float64],
) -> Coefficients:
    """a0…a3 with the least squared error of `part_ms` relative to `total_ms`.

    Plain least squares would serve the longest slices alone: a short slice behind a long context
    costs a tenth as much, and its whole context part is less than their noise.
    """
    weights = 1 / np.maximum(total_ms, 1e-3 * total_ms.max(initial=0.0) + 1e-12)  # a time of 0 weighs finitely
    features = context_features(slice_tokens, context_tokens)
    solution = np.linalg.lstsq(features * weights[:, np.newaxis], part_ms * weights, rcond=None)[0]
    a0, a1, a2, a3 = (float(value) for value in solution)
    return a0, a1, a2, a3
