"""The interface of every cost model, and the one that wraps plain functions.

A cost model answers for ONE stage: how many milliseconds a slice of `slice_tokens` takes when
`context_tokens` of the same sequences came before it. It knows nothing of ranks, order or bubbles.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from terapipe.errors import CostError, TerapipeError

Numbers = int | float | np.integer[Any] | np.floating[Any] | npt.NDArray[Any]
Times = Any  # an ndarray of float64, or one np.float64 where every argument is a number
CostFunction = Callable[[Numbers, Numbers, Numbers], Numbers]


def as_times(values: Numbers, *arguments: Numbers) -> Times:
    """Broadcast what a cost function returned to its arguments; refuse NaN, complex and negative times.

    Infinity is a time: it forbids the slice.
    """
    shape = np.broadcast_shapes(*(np.shape(argument) for argument in arguments))
    if np.iscomplexobj(values):  # numpy would drop the imaginary part
        raise CostError(f"a cost function returned complex numbers, {np.ravel(values)[:1]}; costs must be real numbers ≥ 0.")
    try:
        given = np.asarray(values, dtype=np.float64)
        times = np.broadcast_to(given, shape)
    except (TypeError, ValueError):
        raise CostError(
            f"a cost function returned {np.shape(values)} values ({type(values).__name__}) for arguments of shape {shape}; "
            "it must return numbers, one for each slice or one for all."
        ) from None
    if times.size and not given.min() >= 0:  # one pass, no array made: the minimum of a NaN is NaN
        wrong = np.isnan(times) | (times < 0)
        first = _first(wrong)
        raise CostError(
            f"a cost of {times[first]} ms at {_point(first, *arguments)}: costs must be ≥ 0 (infinity forbids a slice)."
        )
    return times[()]


def _first(wrong: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    """Index of the first that is true."""
    return tuple(int(index[0]) for index in np.nonzero(wrong)) if wrong.shape else ()


def _point(first: tuple[int, ...], *arguments: Numbers) -> str:
    """The arguments at an index of all of them broadcast, by name."""
    labels, columns = ("slice_tokens", "context_tokens", "n_sequences"), np.broadcast_arrays(*arguments)
    return ", ".join(f"{label}={column[first]}" for label, column in zip(labels, columns, strict=False))


class CostModel(ABC):
    """Milliseconds of one slice on one stage; every method is vectorised over numpy arrays.

    Each takes `slice_tokens`, `context_tokens` (tokens of earlier slices that the slice attends to)
    and `n_sequences` in the microbatch, and is only called with slice + context within the sequence.
    """

    @abstractmethod
    def forward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the forward."""

    @abstractmethod
    def backward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the full backward: input and weight gradients."""

    def step_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Forward plus backward: the t of the paper's eq. (5)."""
        return self.forward_ms(slice_tokens, context_tokens, n_sequences) + self.backward_ms(
            slice_tokens, context_tokens, n_sequences
        )

    def weight_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the weight-gradient half; HALF the backward where a model knows no better."""
        return self.backward_ms(slice_tokens, context_tokens, n_sequences) / 2

    def input_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the input-gradient half: backward minus weight; infinite where the backward is.

        Raises `CostError` where the weight half alone is more than the backward.
        """
        backward = self.backward_ms(slice_tokens, context_tokens, n_sequences)
        weight = self.weight_ms(slice_tokens, context_tokens, n_sequences)
        if np.any(np.greater(weight, backward)):
            points = np.broadcast_arrays(weight, backward, slice_tokens, context_tokens, n_sequences)
            first = _first(points[0] > points[1])
            raise CostError(
                f"weight_ms of {points[0][first]} ms is more than backward_ms of {points[1][first]} ms at "
                f"{_point(first, *points[2:])}: the backward is input + weight. Make weight_ms the time of the weight "
                "gradients alone, or leave it out (half the backward)."
            )
        with np.errstate(invalid="ignore"):  # infinity − infinity: the slice is forbidden, and so are both halves
            return np.where(np.isinf(backward), backward, backward - weight)[()]

    def is_extrapolated(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Any:
        """Whether each answer lies beyond what was measured: np.bool_, or an array of them. Not, unless a model says so."""
        shape = np.broadcast_shapes(np.shape(slice_tokens), np.shape(context_tokens), np.shape(n_sequences))
        return np.zeros(shape, dtype=bool)[()]


class CallableCost(CostModel):
    """Costs from functions `f(slice_tokens, context_tokens, n_sequences) → ms`.

    The functions are called by position with numbers or arrays, so that max, if and math.sqrt are
    np.maximum, np.where and np.sqrt in them; results are broadcast.
    `weight_ms` defaults to half the backward.

    Examples
    --------
    >>> cost = CallableCost(forward_ms=lambda l, c, b: b * l * (1 + c / 4096), backward_ms=lambda l, c, b: 2 * b * l)
    >>> float(cost.step_ms(512, 2048))
    1792.0
    """

    def __init__(self, forward_ms: CostFunction, backward_ms: CostFunction, weight_ms: CostFunction | None = None) -> None:
        for name, function in (("forward_ms", forward_ms), ("backward_ms", backward_ms), ("weight_ms", weight_ms)):
            if not callable(function) and not (name == "weight_ms" and function is None):
                raise CostError(f"{name}={function!r}: needs a function of (slice_tokens, context_tokens, n_sequences).")
        self._forward, self._backward, self._weight = forward_ms, backward_ms, weight_ms

    def forward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the forward, from the function given."""
        return _call("forward_ms", self._forward, slice_tokens, context_tokens, n_sequences)

    def backward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the full backward, from the function given."""
        return _call("backward_ms", self._backward, slice_tokens, context_tokens, n_sequences)

    def weight_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the weight-gradient half, from the function given or half the backward."""
        if self._weight is None:
            return super().weight_ms(slice_tokens, context_tokens, n_sequences)
        return _call("weight_ms", self._weight, slice_tokens, context_tokens, n_sequences)


def _call(name: str, function: CostFunction, *arguments: Numbers) -> Times:
    """What a cost function says; one that was written for plain numbers is told so."""
    try:
        values = function(*arguments)
    except TerapipeError:  # a cost model inside it has refused, and has said why
        raise
    except (TypeError, ValueError) as error:
        if not any(np.ndim(argument) for argument in arguments):
            raise
        raise CostError(
            f"{name} raised {type(error).__name__} when it was given numpy arrays: {error}. A cost function gets arrays of "
            "slices at once: use np.maximum(l, 3) for max(l, 3), np.where(l > 3, …, …) for if, np.sqrt(l) for math.sqrt(l)."
        ) from error
    return as_times(values, *arguments)
