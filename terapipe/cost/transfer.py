"""A cost model with messages in it: the paper's slice time, compute plus point-to-point time."""

import numpy as np

from terapipe.cost.link import Link
from terapipe.cost.model import CostModel, Numbers, Times, as_times
from terapipe.errors import CostError, as_number


class TransferCost(CostModel):
    """Adds to each slice's forward, and to its backward, the time of its message to the next stage.

    TeraPipe (ICML 2021) counts t = forward + backward + 2·(point-to-point). A message takes
    link.latency_ms plus the transmission of b·l·bytes_per_token bytes, during which the rank does
    nothing else: plan with this where `simulate` gets `Link(overlap=False)`. Every stage is charged,
    while of a pipeline's stages the last sends no forward and the first no backward: with n equal
    slices the simulated step is exactly one message shorter in either phase than the "two-phase"
    latency of this cost.

    Parameters
    ----------
    cost : CostModel
        What slices cost without messages.
    link : Link
        To the next stage; its `overlap` is not asked.
    bytes_per_token : float
        Size of a message: this times the tokens of its slice, in all its sequences.
    """

    def __init__(self, cost: CostModel, link: Link, bytes_per_token: float) -> None:
        if not isinstance(cost, CostModel):
            raise CostError(f"cost={cost!r}: needs a CostModel, e.g. CallableCost or Profile.fit().")
        if not isinstance(link, Link):
            raise CostError(f"link={link!r}: needs a Link, e.g. Link(latency_ms=0.1, bandwidth_gb_s=12.5).")
        size = as_number(bytes_per_token)
        if not 0 <= size < float("inf"):
            raise CostError(f"bytes_per_token={bytes_per_token!r}: needs a finite number ≥ 0.")
        self.cost, self.link, self.bytes_per_token = cost, link, size

    def forward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the forward and of sending its output."""
        return self.cost.forward_ms(slice_tokens, context_tokens, n_sequences) + self._message_ms(slice_tokens, n_sequences)

    def backward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the full backward and of sending its gradient."""
        return self.cost.backward_ms(slice_tokens, context_tokens, n_sequences) + self._message_ms(slice_tokens, n_sequences)

    def weight_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the weight-gradient half, which sends nothing: the message belongs to the input gradient."""
        return self.cost.weight_ms(slice_tokens, context_tokens, n_sequences)

    def input_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Time of the input-gradient half and of sending its gradient."""
        return self.cost.input_ms(slice_tokens, context_tokens, n_sequences) + self._message_ms(slice_tokens, n_sequences)

    def is_extrapolated(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Whether the cost without messages is extrapolated."""
        return self.cost.is_extrapolated(slice_tokens, context_tokens, n_sequences)

    def _message_ms(self, slices: Numbers, sequences: Numbers) -> Times:
        tokens = np.asarray(slices, dtype=np.float64) * np.asarray(sequences, dtype=np.float64)
        per_token = self.link.transmission_ms(1.0) * self.bytes_per_token
        return as_times(self.link.latency_ms + per_token * tokens, slices, sequences)
