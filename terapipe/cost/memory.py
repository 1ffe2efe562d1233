"""What the stages of a model keep in memory, counted from the model's shape. Knows no times, tensors or allocator.

Counted is what lies there between two actions of a step. Left out: gradients of weights, the
optimizer's state, what an action needs only while it runs, messages on their way, attention masks
(shared by all units), indices of tokens, and what an allocator adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from terapipe.config import ModelConfig, split_layers
from terapipe.cost.held import Ordered, find_held
from terapipe.errors import ConfigError, CostError, check_integer, unknown_name

VALUE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
INDEX_BYTES = 8  # of a position
LEAST_FLOAT_BYTES = 4  # softmax statistics and the loss are float32 or wider
N_NORMS = N_MASKS = 2  # of one layer: before and after attention, before and after the feed-forward


class StageMemory(NamedTuple):
    """Bytes that one stage keeps.

    Attributes
    ----------
    activation_bytes_per_token : int
        For every token of a unit, in each of its sequences, from its F to its B or I.
    activation_bytes_per_position : int
        The same, but once for all sequences.
    queue_bytes_per_token : int
        From a unit's I to its W: inputs and output gradients of the linear layers.
    context_bytes_per_token : int
        For every token of a microbatch, from its first F to its last B or I.
    weight_bytes : int
        Always.
    """

    activation_bytes_per_token: int
    activation_bytes_per_position: int
    queue_bytes_per_token: int
    context_bytes_per_token: int
    weight_bytes: int


@dataclass(frozen=True)
class MemoryModel:
    """Bytes that each stage of a model keeps.

    A token of one layer, h features wide, with attention that keeps no matrix (flash):

    * inputs of the two norms, the input that queries, keys and values share, queries, attention's
      output, and the feed-forward's input: 6h values;
    * the feed-forward's wide input and output, 2·d_ff (SwiGLU: gate and product too, 4·d_ff);
    * keys and values, 2·n_kv_heads·head_dim, and in a pipeline of slices as much for their
      gradients: of the whole microbatch from its first slice on, as one buffer holds them;
    * with dropout, two masks of a byte a feature, of the whole microbatch too.

    With h = n_kv_heads·head_dim and d_ff = 4h at 2 bytes a value that is the 34·h bytes of Korthikanti
    et al. (arXiv 2205.05198), eq. (2) without 5as/h. Smaller parts, which they neglect: mean and
    deviation of a LayerNorm, deviation of an RMSNorm, a softmax statistic a head. As PyTorch computes
    them on the CPU, RMSNorm keeps its normed input (h each), and rotary positions a copy of
    attention's output (h) and sines and cosines (2·head_dim, once for all sequences).

    A stage keeps its output (h) until its backward, unless the next stage, on the same rank, keeps it
    as its input; the last keeps the final norm's input and output and the log-probabilities of the
    vocabulary instead.

    Parameters
    ----------
    model : ModelConfig
        Gives the sizes.
    dtype : "float32", "float64", "float16" or "bfloat16"
        Of weights, activations, keys and values.
    n_layers : int or list of int, optional
        Layers of every stage, or of each; by default the model's, divided over the stages as
        `RunSpec` does. The first stage has the embedding besides, the last the head.
    """

    model: ModelConfig
    dtype: str = "float32"
    n_layers: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelConfig):
            raise CostError(f"model={self.model!r}: needs a ModelConfig, e.g. ModelConfig.preset('tour').")
        if self.dtype not in VALUE_BYTES:
            raise CostError(unknown_name("dtype", self.dtype, VALUE_BYTES))
        if isinstance(self.n_layers, Sequence) and not isinstance(self.n_layers, str):
            counts = tuple(check_integer(f"n_layers[{at}]", each, 1, CostError) for at, each in enumerate(self.n_layers))
            object.__setattr__(self, "n_layers", counts)
        elif self.n_layers is not None:
            object.__setattr__(self, "n_layers", check_integer("n_layers", self.n_layers, 1, CostError))

    @property
    def value_bytes(self) -> int:
        """Bytes of one value."""
        return VALUE_BYTES[self.dtype]

    def stages(self, stage_to_rank: Sequence[int]) -> list[StageMemory]:
        """What each stage keeps, of a pipeline whose stages live on these ranks.

        Raises
        ------
        CostError
            Where `n_layers` does not fit the number of stages.
        """
        last = len(stage_to_rank) - 1
        found = []
        for stage, n_layers in enumerate(self._layer_counts(len(stage_to_rank))):
            is_first, is_last = stage == 0, stage == last
            is_handed_over = not is_first and stage_to_rank[stage - 1] == stage_to_rank[stage]
            found.append(self._stage(n_layers, is_first, is_last, is_handed_over))
        return found

    def rank_weight_bytes(self, stage_to_rank: Sequence[int]) -> list[int]:
        """Bytes of parameters on each rank; a tied embedding counts once on a rank with both ends."""
        weights = [0] * (max(stage_to_rank) + 1)
        for rank, stage in zip(stage_to_rank, self.stages(stage_to_rank), strict=True):
            weights[rank] += stage.weight_bytes
        if self.model.tied_embedding and len(stage_to_rank) > 1 and stage_to_rank[0] == stage_to_rank[-1]:
            weights[stage_to_rank[0]] -= self.model.vocab_size * self.model.d_model * self.value_bytes
        return weights

    def held(self, schedule: Ordered) -> pd.DataFrame:
        """What each rank holds once each action of a schedule has ended: rank, units and bytes (`cost.held`)."""
        self.check(schedule)
        homes = schedule.stage_to_rank
        return find_held(schedule, self.stages(homes), self.rank_weight_bytes(homes))

    def check(self, schedule: Ordered) -> None:
        """Refuse a schedule whose memory this does not model.

        Raises
        ------
        CostError
            Where `n_layers` does not fit the number of stages, or nothing goes backward.
        """
        self.stages(schedule.stage_to_rank)
        if all(action.kind == "F" for order in schedule.orders for action in order):
            raise CostError(
                "a schedule of forwards alone keeps no activations from one action to the next; memory is modelled for "
                "training steps. Leave memory= out, or use a schedule with backwards."
            )

    def peak_bytes(self, schedule: Ordered) -> pd.Series:
        """Most bytes on each rank between two actions of a training step; index = rank.

        What a rank holds changes with its own actions only, so its order decides the peak, and
        timelines of one schedule agree.
        """
        return self.held(schedule).groupby("rank")["total_bytes"].max().rename("peak_bytes").astype("int64")

    def _layer_counts(self, n_stages: int) -> Sequence[int]:
        if isinstance(self.n_layers, int):
            return [self.n_layers] * n_stages
        if self.n_layers is None:
            try:
                return [len(layers) for layers in split_layers(self.model.n_layers, n_stages)]
            except ConfigError as error:
                raise CostError(f"{error} Or say what a stage has: MemoryModel(model, dtype, n_layers=…).") from None
        if len(self.n_layers) != n_stages:
            raise CostError(f"n_layers={list(self.n_layers)} names {len(self.n_layers)} stages; the schedule has {n_stages}.")
        return self.n_layers

    def _stage(self, n_layers: int, is_first: bool, is_last: bool, is_handed_over: bool) -> StageMemory:
        model, size, wide_size = self.model, self.value_bytes, max(self.value_bytes, LEAST_FLOAT_BYTES)
        width, vocabulary = model.d_model, model.vocab_size
        values, positions = n_layers * self._layer_values, n_layers * self._layer_position_values * size
        statistics = n_layers * model.n_heads * wide_size
        queue, masks = n_layers * self._layer_queue_values * size, n_layers * N_MASKS
        weights = n_layers * self._layer_weights
        if is_first:
            masks += 1
            weights += vocabulary * width + (model.max_seq_tokens * width if model.position == "learned" else 0)
            positions += INDEX_BYTES if model.position == "learned" else 0
        if is_last:
            values += self._norm_values + width
            statistics += vocabulary * wide_size
            queue += width * size + vocabulary * size
            weights += self._norm_weights + (0 if model.tied_embedding and is_first else vocabulary * width)
        else:
            values += width
        values -= width * is_handed_over
        kept = 2 * 2 * model.kv_heads * model.head_dim * size * n_layers
        dropped = masks * width if model.dropout > 0 else 0
        return StageMemory(values * size + statistics, positions, queue, kept + dropped, weights * size)

    @property
    def _layer_values(self) -> int:
        """A layer's values a token, keys and values left out."""
        width, is_rotary = self.model.d_model, self.model.position == "rotary"
        n_wide = 4 if self.model.activation == "swiglu" else 2
        normed = N_NORMS * (self._norm_values + width)
        return normed + (3 if is_rotary else 2) * width + n_wide * self.model.ff_dim

    @property
    def _layer_position_values(self) -> int:
        """Sine and cosine of half a head's features, for queries and for keys."""
        return 2 * self.model.head_dim if self.model.position == "rotary" else 0

    @property
    def _layer_queue_values(self) -> int:
        """Inputs and output gradients of a layer's linear layers."""
        model = self.model
        n_wide = 2 if model.activation == "swiglu" else 1
        inputs = 3 * model.d_model + model.ff_dim
        gradients = 3 * model.d_model + 2 * model.kv_heads * model.head_dim + n_wide * model.ff_dim
        return inputs + gradients

    @property
    def _norm_values(self) -> int:
        """What a norm keeps of a token: its input and statistics."""
        return self.model.d_model + 2 if self.model.norm == "layernorm" else 2 * self.model.d_model + 1

    @property
    def _norm_weights(self) -> int:
        return self.model.d_model * (2 if self.model.norm == "layernorm" and self.model.bias else 1)

    @property
    def _layer_weights(self) -> int:
        width, wide, kv_width = self.model.d_model, self.model.ff_dim, self.model.kv_heads * self.model.head_dim
        n_wide = 2 if self.model.activation == "swiglu" else 1
        matrices = 2 * width * (width + kv_width) + (n_wide + 1) * width * wide
        biases = (3 * width + 2 * kv_width + n_wide * wide) if self.model.bias else 0
        return matrices + biases + N_NORMS * self._norm_weights
