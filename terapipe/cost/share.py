"""A cost model of a part of another's layers: what one of several equal stages on a rank costs."""

from typing import Any

from terapipe.cost.model import CostModel, Numbers, Times
from terapipe.errors import CostError, check_integer


class StageShare(CostModel):
    """One of n equal stages that a rank's layers are cut into: each time is 1/n of the whole's.

    A cost model is of one stage. With v stages a rank (interleaved, zbv, …) the same model has v times
    as many stages, each of 1/v of the layers: simulate it with `StageShare(cost, v)` where `cost` is of
    all layers of a rank. That flatters many stages where a slice has a cost of its own (launching kernels).

    Parameters
    ----------
    cost : CostModel
        Of all layers of a rank.
    n_parts : int
        Stages on the rank.

    Raises
    ------
    CostError
        For what is no cost model, and a number of stages below 1.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost = tp.CallableCost(lambda l, c, b: b * l, lambda l, c, b: 2 * b * l)
    >>> float(tp.StageShare(cost, 2).forward_ms(8, 0))
    4.0
    """

    def __init__(self, cost: CostModel, n_parts: int) -> None:
        if not isinstance(cost, CostModel):
            raise CostError(f"cost={cost!r}: needs a CostModel, e.g. CallableCost or Profile.fit().")
        self.cost, self.n_parts = cost, check_integer("n_parts", n_parts, 1, CostError)

    def forward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the forward through one of the stages."""
        return self.cost.forward_ms(slice_tokens, context_tokens, n_sequences) / self.n_parts

    def backward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the full backward through one of the stages."""
        return self.cost.backward_ms(slice_tokens, context_tokens, n_sequences) / self.n_parts

    def weight_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the weight-gradient half of one of the stages."""
        return self.cost.weight_ms(slice_tokens, context_tokens, n_sequences) / self.n_parts

    def input_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the input-gradient half of one of the stages."""
        return self.cost.input_ms(slice_tokens, context_tokens, n_sequences) / self.n_parts

    def is_extrapolated(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Any:
        """Whether the cost of the whole is extrapolated."""
        return self.cost.is_extrapolated(slice_tokens, context_tokens, n_sequences)
