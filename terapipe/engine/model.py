"""The built-in model: a decoder-only causal language model whose layer ranges make stages.

Pre-norm blocks; the embedding stands on the first stage, the last norm and the head on the last.
A module of yours can take its place: see `engine.stage` for what a stage must offer.

Shapes: B sequences, T slice tokens, C context tokens, H query heads, G key/value heads, D head
features, E model features, V vocabulary.
"""

from functools import lru_cache
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn import functional

from terapipe.config import ModelConfig
from terapipe.engine.context import Context
from terapipe.engine.weights import WeightQueue, linear

EMBEDDING = -1  # the "layer" of the embedding's dropout

cached_masks: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # by address, for who counts bytes


@lru_cache(maxsize=32)
def lower_right_mask(length: int, total: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask (T, C+T): the queries are the LAST rows, so row i sees C + i + 1 keys."""
    hidden = torch.full((length, total), float("-inf"), dtype=dtype).triu_(diagonal=total - length + 1)
    cached_masks[hidden.data_ptr()] = hidden
    return hidden


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of a slice: queries (B, H, T, D), keys and values (B, G, C+T, D) → (B, H, T, D)."""
    length, total = queries.shape[2], keys.shape[2]
    grouped = queries.shape[1] != keys.shape[1]
    if length == total:  # no context: square, where top-left and lower-right alignment agree
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
    mask: torch.Tensor
    if queries.device.type == "cpu":
        mask = lower_right_mask(length, total, queries.dtype)
    else:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(length, total)  # a tensor only in name; it selects a fused kernel
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)


class Rotary(nn.Module):
    """Rotary positions: rotates pairs of features by an angle that grows with the position."""

    angles: torch.Tensor

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        half = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
        angles = torch.outer(torch.arange(model.max_seq_tokens, dtype=torch.float64), model.rope_theta**-half)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate (B, heads, T, D) at positions (T,)."""
        angles = self.angles[positions]
        cosine, sine = angles.cos().to(inputs.dtype), angles.sin().to(inputs.dtype)  # (T, D/2)
        first, second = inputs.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, model.head_dim
        width, kv_width = model.d_model, model.kv_heads * model.head_dim
        self.query = nn.Linear(width, width, bias=model.bias)
        self.key = nn.Linear(width, kv_width, bias=model.bias)
        self.value = nn.Linear(width, kv_width, bias=model.bias)
        self.output = nn.Linear(width, width, bias=model.bias)
        self.rotary = Rotary(model) if model.position == "rotary" else None

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """(B, T, E) → (B, T, E), attending to the context and to earlier rows of the slice."""
        queries, keys, values = (
            linear(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, D)
            for linear in (self.query, self.key, self.value)
        )
        if self.rotary is not None:
            queries, keys = self.rotary(queries, positions), self.rotary(keys, positions)
        keys, values = context.append(self.layer, keys, values)  # (B, G, C+T, D)
        mixed: torch.Tensor = self.output(attend(queries, keys, values).transpose(1, 2).flatten(-2))
        return mixed


class FeedForward(nn.Module):
    """GELU or SwiGLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(model.d_model, model.ff_dim, bias=model.bias)
        self.gate = nn.Linear(model.d_model, model.ff_dim, bias=model.bias) if model.activation == "swiglu" else None
        self.down = nn.Linear(model.ff_dim, model.d_model, bias=model.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(B, T, E) → (B, T, E)."""
        up = self.up(inputs)
        inner = functional.gelu(up) if self.gate is None else functional.silu(self.gate(inputs)) * up
        result: torch.Tensor = self.down(inner)
        return result


def make_norm(model: ModelConfig) -> nn.Module:
    """LayerNorm or RMSNorm over the model's features."""
    if model.norm == "rmsnorm":
        return nn.RMSNorm(model.d_model, eps=model.norm_eps)
    return nn.LayerNorm(model.d_model, eps=model.norm_eps, bias=model.bias)


class Block(nn.Module):
    """One transformer layer, pre-norm."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.probability = layer, model.dropout
        self.attention_norm, self.attention = make_norm(model), Attention(model, layer)
        self.feed_forward_norm, self.feed_forward = make_norm(model), FeedForward(model)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """(B, T, E) → (B, T, E)."""
        mixed = self.attention(self.attention_norm(inputs), positions, context)
        inputs = inputs + context.dropout(mixed, self.layer, 0, self.probability)
        return inputs + context.dropout(self.feed_forward(self.feed_forward_norm(inputs)), self.layer, 1, self.probability)


class DecoderStage(nn.Module):
    """Layers `layers` of the model; parameter names are those of the whole model."""

    weight_queue: WeightQueue | None = None  # where the backward is split: for the head, whose weight may be tied

    def __init__(self, model: ModelConfig, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model, self.is_first, self.is_last = model, is_first, is_last
        if is_first or (is_last and model.tied_embedding):
            self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        if is_first and model.position == "learned":
            self.position_embedding = nn.Embedding(model.max_seq_tokens, model.d_model)
        self.layers = nn.ModuleDict({str(layer): self.block(model, layer) for layer in layers})
        if is_last:
            self.norm = make_norm(model)
            if not model.tied_embedding:
                self.head = nn.Linear(model.d_model, model.vocab_size, bias=False)

    def block(self, model: ModelConfig, layer: int) -> nn.Module:
        """One layer; override it to try a block of your own."""
        return Block(model, layer)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """Tokens (B, T) or features (B, T, E) → features (B, T, E), or logits (B, T, V) on the last stage."""
        hidden = self.embed(inputs, positions, context) if self.is_first else inputs
        for layer in self.layers.values():
            hidden = layer(hidden, positions, context)
        if not self.is_last:
            return hidden
        weight = self.embedding.weight if self.model.tied_embedding else self.head.weight
        return linear(self.norm(hidden), weight, queue=self.weight_queue)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """Tokens (B, T) → features (B, T, E)."""
        hidden = self.embedding(tokens)
        if self.model.position == "learned":
            hidden = hidden + self.position_embedding(positions)
        return context.dropout(hidden, EMBEDDING, 0, self.model.dropout)
