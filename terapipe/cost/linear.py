"""The paper's performance model, eq. (9): a slice's own time plus a context part that is linear."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terapipe.cost.model import CostModel, Numbers, Times, as_times
from terapipe.errors import CostError, as_number, check_integer

Coefficients = tuple[float, float, float, float]
_NO_CONTEXT: Coefficients = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class LinearContextCost(CostModel):
    """t(l, c) = t(l, 0) + t_ctx(l, c), with t_ctx(l, c) = a0 + a1·l + a2·c + a3·l·c and t_ctx(l, 0) = 0.

    TeraPipe (ICML 2021), eq. (9), for forward and backward apart. t(l, 0) is linear between the
    measured lengths and refused beyond them. A negative sum counts as 0. Contexts and numbers of
    sequences beyond those measured are answered; `is_extrapolated` tells.

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
    seq_tokens : int, optional
        Longest slice + context measured behind a context; beyond it answers are extrapolated. The sum,
        as a profile measures each length behind all that is left. None: not known, none counts as beyond.
    weight_alone_ms : tuple of float, optional
        Time of the weight-gradient half at those lengths; it has no context part, as attention has no
        weights. None: not known, half the backward.
    input_alone_ms, input_context : tuples, optional
        The input-gradient half's t(l, 0) and a0…a3, where it was measured, which takes weight_alone_ms
        too. None: the backward minus the weight-gradient half.

    Raises
    ------
    CostError
        For lengths that do not ascend, another number of times or coefficients, or what is no number.
    """

    slice_tokens: tuple[int, ...]
    forward_alone_ms: tuple[float, ...]
    backward_alone_ms: tuple[float, ...]
    forward_context: Coefficients = _NO_CONTEXT
    backward_context: Coefficients = _NO_CONTEXT
    n_sequences: int = 1
    seq_tokens: int | None = None
    weight_alone_ms: tuple[float, ...] | None = None
    input_alone_ms: tuple[float, ...] | None = None
    input_context: Coefficients = _NO_CONTEXT

    def __post_init__(self) -> None:
        lengths = tuple(check_integer("slice_tokens", each, 1, CostError) for each in self._tuple("slice_tokens"))
        if not lengths or list(lengths) != sorted(set(lengths)):
            raise CostError(f"slice_tokens={lengths}: needs distinct lengths in ascending order.")
        object.__setattr__(self, "slice_tokens", lengths)
        for name in ("forward_alone_ms", "backward_alone_ms", "weight_alone_ms", "input_alone_ms"):
            if getattr(self, name) is None and name in ("weight_alone_ms", "input_alone_ms"):
                continue
            times = self._numbers(name)
            if len(times) != len(lengths):
                raise CostError(f"{name} has {len(times)} values for {len(lengths)} lengths.")
            as_times(np.asarray(times), np.asarray(lengths))
            object.__setattr__(self, name, times)
        for name in ("forward_context", "backward_context", "input_context"):
            coefficients = self._numbers(name)
            if len(coefficients) != 4 or not all(map(math.isfinite, coefficients)):
                raise CostError(f"{name}={getattr(self, name)!r}: needs the four finite numbers a0, a1, a2, a3 of eq. (9).")
            object.__setattr__(self, name, coefficients)
        object.__setattr__(self, "n_sequences", check_integer("n_sequences", self.n_sequences, 1, CostError))
        if self.seq_tokens is not None:
            object.__setattr__(self, "seq_tokens", check_integer("seq_tokens", self.seq_tokens, 1, CostError))
        self._check_halves()

    def _check_halves(self) -> None:
        if self.input_alone_ms is not None:
            if self.weight_alone_ms is None:
                raise CostError(
                    "input_alone_ms is given without weight_alone_ms; give both halves of the backward, or neither."
                )
            return
        if any(self.input_context):
            raise CostError(f"input_context={self.input_context} is given without input_alone_ms; give both, or neither.")
        for length, weight, whole in zip(self.slice_tokens, self.weight_alone_ms or (), self.backward_alone_ms, strict=False):
            if weight > whole:
                raise CostError(
                    f"weight_alone_ms={weight} is longer than backward_alone_ms={whole} at {length} tokens: the weight "
                    "gradients are a part of the backward. Where both halves were measured, give input_alone_ms too."
                )

    def _tuple(self, name: str) -> tuple[object, ...]:
        try:
            return tuple(getattr(self, name))
        except TypeError:
            raise CostError(f"{name}={getattr(self, name)!r}: needs a tuple, list or array of numbers.") from None

    def _numbers(self, name: str) -> tuple[float, ...]:
        numbers = tuple(map(as_number, self._tuple(name)))
        if any(map(math.isnan, numbers)):
            raise CostError(f"{name}={getattr(self, name)!r}: needs numbers.")
        return numbers

    def forward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the forward by eq. (9)."""
        return self._time(self.forward_alone_ms, self.forward_context, slice_tokens, context_tokens, n_sequences)

    def backward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the full backward by eq. (9)."""
        return self._time(self.backward_alone_ms, self.backward_context, slice_tokens, context_tokens, n_sequences)

    def weight_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the weight-gradient half, the same behind any context; half the backward where it is not known."""
        if self.weight_alone_ms is None:
            return super().weight_ms(slice_tokens, context_tokens, n_sequences)
        return self._time(self.weight_alone_ms, _NO_CONTEXT, slice_tokens, context_tokens, n_sequences)

    def input_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the input-gradient half by eq. (9); backward minus weight where it was not measured."""
        if self.input_alone_ms is None:
            return super().input_ms(slice_tokens, context_tokens, n_sequences)
        return self._time(self.input_alone_ms, self.input_context, slice_tokens, context_tokens, n_sequences)

    def is_extrapolated(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Whether each answer lies behind a longer context than was measured, or is of another number of sequences."""
        before, sequences = np.asarray(context_tokens), np.asarray(n_sequences)
        reach = math.inf if self.seq_tokens is None else self.seq_tokens
        return (((before > 0) & (np.asarray(slice_tokens) + before > reach)) | (sequences != self.n_sequences))[()]

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
