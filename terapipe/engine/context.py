"""The key/value context: keys and values of earlier slices, and the gradients later slices send back.

Each layer's keys and values of a microbatch live in one preallocated buffer per stage:

    rows      0 ......... start ..... end ......... L
    forward   [  earlier slices | own ]                own rows written, prefix [:end] returned
    backward  [ += gradient of prefix ]                own rows [start:end] are then complete

A microbatch's backward runs its last slice first, so by the time a slice's backward reads the
gradient of its own rows, every later slice has added its part. That is exact with any attention
kernel. Detaching the prefix instead would silently lose those parts.

Shapes: B sequences, G key/value heads, L tokens of the sequence, D head features, E model features.
"""

from typing import Any, Protocol

import numpy as np
import torch


class Context(Protocol):
    """What a stage's forward gets to know of the rest of its sequence."""

    @property
    def n_tokens(self) -> int:
        """Tokens before this slice."""

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add this slice's keys and values (B, G, T, D); return those of all tokens up to its end."""

    def dropout(self, inputs: torch.Tensor, layer: int, site: int, probability: float) -> torch.Tensor:
        """Drop features of (B, T, E); `layer` and `site` name the place, so that masks do not depend on the slicing."""


class MaskSource:
    """Dropout masks of one microbatch, drawn for the whole sequence and cut by rows.

    The mask of a place depends on (seed, step, microbatch, layer, site) only: it is the same for
    every slicing, schedule and cut into stages. Without `drops`, as in evaluation, nothing is dropped.
    """

    def __init__(self, seed: int, step: int, microbatch: int, seq_tokens: int, drops: bool = True) -> None:
        self.key, self.seq_tokens = (seed, step + 2**20, microbatch), seq_tokens  # warm-up steps are below 0
        self.drops = drops
        self.masks: dict[tuple[int, int], torch.Tensor] = {}

    def drop(self, inputs: torch.Tensor, start: int, layer: int, site: int, probability: float) -> torch.Tensor:
        """Apply the rows of the mask that belong to `inputs` (B, T, E), which start at `start`."""
        if probability == 0 or not self.drops:
            return inputs
        batch, length, features = inputs.shape
        if (layer, site) not in self.masks:
            state = np.random.SeedSequence((*self.key, layer + 1, site)).generate_state(1)
            generator = torch.Generator().manual_seed(int(state[0]))
            kept = torch.rand((batch, self.seq_tokens, features), generator=generator) >= probability
            self.masks[layer, site] = kept.to(inputs.device)
        mask = self.masks[layer, site][:, start : start + length]
        return inputs * mask / (1 - probability)


class WholeContext:
    """The context of an unsliced sequence: nothing before it, keys and values as they are."""

    n_tokens = 0

    def __init__(self, masks: MaskSource) -> None:
        self.masks = masks

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Context`."""
        return keys, values

    def dropout(self, inputs: torch.Tensor, layer: int, site: int, probability: float) -> torch.Tensor:
        """See `Context`."""
        return self.masks.drop(inputs, 0, layer, site, probability)


class Buffer:
    """Rows of one tensor kind (keys or values) of one layer and microbatch, and their gradients."""

    def __init__(self, like: torch.Tensor, seq_tokens: int) -> None:
        batch, heads, _, features = like.shape
        self.rows = torch.zeros((batch, heads, seq_tokens, features), dtype=like.dtype, device=like.device)
        self.gradient = torch.zeros_like(self.rows)


class _Append(torch.autograd.Function):
    """Forward: write the slice's rows, return the prefix. Backward: see the module's drawing."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, buffer: Buffer, start: int) -> torch.Tensor:
        end = start + rows.shape[2]
        ctx.buffer, ctx.start, ctx.end = buffer, start, end
        # .data has a version counter of its own: later slices write other rows of this storage,
        # which autograd would take for a change of the prefix saved here.
        stored = buffer.rows.data
        stored[:, :, start:end] = rows
        return stored[:, :, :end]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = ctx.buffer.gradient
        if ctx.end == total.shape[2]:
            total.copy_(gradient)  # the last slice comes first and covers every row
        else:
            total[:, :, : ctx.end] += gradient
        return total[:, :, ctx.start : ctx.end], None, None


class ContextPool:
    """Buffers of finished microbatches, kept for the next ones."""

    def __init__(self) -> None:
        self.free: dict[tuple[Any, ...], list[Buffer]] = {}

    def take(self, like: torch.Tensor, seq_tokens: int) -> Buffer:
        """A buffer for rows like `like`, new or used."""
        free = self.free.get(self._key(like.shape[:2], like.shape[3:], seq_tokens, like))
        return free.pop() if free else Buffer(like, seq_tokens)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        shape = buffer.rows.shape
        self.free.setdefault(self._key(shape[:2], shape[3:], shape[2], buffer.rows), []).append(buffer)

    @staticmethod
    def _key(outer: torch.Size, inner: torch.Size, seq_tokens: int, like: torch.Tensor) -> tuple[Any, ...]:
        return (*outer, *inner, seq_tokens, like.dtype, like.device)


class MicrobatchContext:
    """All buffers and masks of one microbatch on one stage."""

    def __init__(self, masks: MaskSource, pool: ContextPool) -> None:
        self.masks, self.pool = masks, pool
        self.buffers: dict[tuple[int, str], Buffer] = {}

    def store(self, layer: int, kind: str, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Write rows from `start`; return the prefix, with the gradient boundary."""
        if (layer, kind) not in self.buffers:
            self.buffers[layer, kind] = self.pool.take(rows, self.masks.seq_tokens)
        prefix: torch.Tensor = _Append.apply(rows, self.buffers[layer, kind], start)  # type: ignore[no-untyped-call]
        return prefix

    def release(self) -> None:
        """Give the buffers back: the microbatch's backward is done."""
        for buffer in self.buffers.values():
            self.pool.give(buffer)
        self.buffers.clear()


class SliceContext:
    """The context of one slice: the microbatch's buffers up to where the slice begins."""

    def __init__(self, microbatch: MicrobatchContext, n_tokens: int) -> None:
        self.microbatch, self.n_tokens = microbatch, n_tokens

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Context`."""
        store = self.microbatch.store
        return store(layer, "keys", keys, self.n_tokens), store(layer, "values", values, self.n_tokens)

    def dropout(self, inputs: torch.Tensor, layer: int, site: int, probability: float) -> torch.Tensor:
        """See `Context`."""
        return self.microbatch.masks.drop(inputs, self.n_tokens, layer, site, probability)
