"""What one stage keeps in memory, counted from the model's shape. Knows no times, tensors or allocator.

A slice's activations live from its F to its B (or W); the keys and values of a microbatch, and their
gradients, from its first F to its last B, for the whole sequence: the engine stores them in one
buffer. Left out: embedding, output head and loss, gradients of weights, the optimizer's state, and
what an allocator adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pandas as pd

from terapipe.config import ModelConfig
from terapipe.errors import CostError, check_integer, unknown_name

VALUE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
N_NORMS = N_MASKS = 2  # of one layer: before and after attention, before and after the feed-forward


class Ordered(Protocol):
    """What is read of a schedule: each rank's actions, and the slicing that they name."""

    @property
    def orders(self) -> Sequence[Sequence[Any]]:
        """Actions with stage, kind, microbatch and slice, rank by rank."""

    @property
    def slicing(self) -> Any:
        """Microbatches with n_sequences and slice_tokens."""


@dataclass(frozen=True)
class MemoryModel:
    """Bytes that a stage of `n_layers` layers keeps.

    A token of one layer, h features wide, with attention that keeps no matrix (flash): inputs of the
    two norms, the input that queries, keys and values share, queries, attention's output and the
    feed-forward's input: 6h values; of the feed-forward its wide input and output, 2·d_ff (SwiGLU:
    gate and product too, 4·d_ff); keys and values, 2·n_kv_heads·head_dim; with dropout, two masks of
    a byte a feature. With h = n_kv_heads·head_dim and d_ff = 4h at 2 bytes a value that is the 34·h
    bytes of Korthikanti et al. (arXiv 2205.05198), eq. (2) without 5as/h.

    Parameters
    ----------
    model : ModelConfig
        Gives the sizes.
    dtype : "float32", "float64", "float16" or "bfloat16"
        Of weights, activations, keys and values.
    n_layers : int
        Layers of one stage.
    """

    model: ModelConfig
    dtype: str = "float32"
    n_layers: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelConfig):
            raise CostError(f"model={self.model!r}: needs a ModelConfig, e.g. ModelConfig.preset('tour').")
        if self.dtype not in VALUE_BYTES:
            raise CostError(unknown_name("dtype", self.dtype, VALUE_BYTES))
        check_integer("n_layers", self.n_layers, 1, CostError)

    @property
    def value_bytes(self) -> int:
        """Bytes of one value."""
        return VALUE_BYTES[self.dtype]

    @property
    def activation_bytes_per_token(self) -> int:
        """Kept for every token of a slice from its F to its B, without keys and values."""
        n_wide = 4 if self.model.activation == "swiglu" else 2
        values = 6 * self.model.d_model + n_wide * self.model.ff_dim
        masks = N_MASKS * self.model.d_model * (self.model.dropout > 0)
        return self.n_layers * (values * self.value_bytes + masks)

    @property
    def context_bytes_per_token(self) -> int:
        """Keys and values, and as much for their gradients, of every token of a live microbatch."""
        return self.n_layers * 2 * 2 * self.model.kv_heads * self.model.head_dim * self.value_bytes

    @property
    def weight_bytes(self) -> int:
        """Parameters of the stage's layers."""
        width, wide, kv_width = self.model.d_model, self.model.ff_dim, self.model.kv_heads * self.model.head_dim
        n_wide = 2 if self.model.activation == "swiglu" else 1
        matrices = 2 * width * (width + kv_width) + (n_wide + 1) * width * wide
        biases = (3 * width + 2 * kv_width + n_wide * wide) if self.model.bias else 0
        norms = N_NORMS * width * (2 if self.model.norm == "layernorm" and self.model.bias else 1)
        return self.n_layers * (matrices + biases + norms) * self.value_bytes

    def peak_bytes(self, schedule: Ordered) -> pd.Series:
        """Most bytes on each rank at any time of a training step: weights, activations, keys and values; index = rank.

        What a rank holds changes with its own actions only, so its order decides the peak, and
        timelines of one schedule agree.
        """
        peaks = [self._peak(order, schedule.slicing.microbatches) for order in schedule.orders]
        return pd.Series(peaks, index=pd.RangeIndex(len(peaks), name="rank"), name="peak_bytes")

    def _peak(self, order: Sequence[Any], microbatches: Sequence[Any]) -> int:
        held = self.weight_bytes * len({action.stage for action in order})
        peak = held
        n_left: dict[tuple[int, int], int] = {}  # slices of a live microbatch that are still to go backward
        for action in order:
            microbatch, place = microbatches[action.microbatch], (action.stage, action.microbatch)
            slice_bytes = self.activation_bytes_per_token * microbatch.n_sequences * microbatch.slice_tokens[action.slice]
            context_bytes = self.context_bytes_per_token * microbatch.n_sequences * sum(microbatch.slice_tokens)
            if action.kind == "F":
                held += slice_bytes + (context_bytes if place not in n_left else 0)
                n_left.setdefault(place, len(microbatch.slice_tokens))
                peak = max(peak, held)
            if action.kind in ("B", "W"):
                held -= slice_bytes
            if action.kind in ("B", "I"):
                n_left[place] -= 1
                held -= context_bytes if n_left[place] == 0 else 0
        return int(peak)
