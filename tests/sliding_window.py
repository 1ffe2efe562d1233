"""A stage of your own in about 40 lines: attention that sees only the last 5 tokens.

Named by its import path, RunSpec(stage="sliding_window:SlidingWindowStage"), it runs on every rank.
"""

import torch
from torch import nn
from torch.nn import functional

from terapipe.config import ModelConfig
from terapipe.engine.context import Context
from terapipe.engine.model import Attention, Block, DecoderStage

WINDOW = 5  # keys that a token sees, its own among them


class SlidingWindowAttention(Attention):
    """Token p attends to tokens p−WINDOW+1 … p, wherever the slices are cut."""

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        queries, keys, values = (
            linear(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        if self.rotary is not None:
            queries, keys = self.rotary(queries, positions), self.rotary(keys, positions)
        keys, values = context.append(self.layer, keys, values)  # of all tokens up to the slice's end
        first = max(0, context.n_tokens - WINDOW + 1)  # older ones no token of this slice sees
        age = positions[:, None] - torch.arange(first, keys.shape[2])
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys[:, :, first:],
            values[:, :, first:],
            attn_mask=(age >= 0) & (age < WINDOW),
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return self.output(mixed.transpose(1, 2).flatten(-2))


class SlidingWindowStage(DecoderStage):
    """The built-in decoder with that attention; all else, the parameters' names too, stays as it is."""

    def block(self, model: ModelConfig, layer: int) -> nn.Module:
        block = Block(model, layer)
        block.attention = SlidingWindowAttention(model, layer)
        return block
