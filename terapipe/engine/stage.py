"""Forward and backward of one slice on one stage.

A stage's module follows this protocol, and any importable class that does can stand in the built-in
model's place (`RunSpec(stage="package.module:Class")`):

    Class(model: ModelConfig, layers: range, is_first: bool, is_last: bool) → nn.Module
    forward(inputs, positions, context) → outputs

* inputs: tokens (B, T) on the first stage, else features (B, T, E); outputs: features (B, T, E), on
  the last stage logits (B, T, V). positions (T,) are those of the slice in its sequence.
* context (`engine.context.Context`): `append(layer, keys, values)` returns keys and values of all
  tokens up to the slice's end; the slice's queries are the LAST rows of those. `dropout(…)` draws
  masks that do not depend on the slicing. Both take the layer's number in the whole model.
* A parameter is named as in the whole model (e.g. "layers.3.…"). One that appears on several stages
  is shared: equal at the start, its gradients summed.
* Where a schedule splits a stage's backward, its linear layers queue their weight gradients, which W
  makes; all other gradients are made in I. Linear layers are found by type: every nn.Linear that is
  called as a module. A product without one, of a tied weight say, joins them as
  `engine.weights.linear(inputs, weight, bias, self.weight_queue)`, if the class says
  `weight_queue = None`; else it stays in I, and is as exact. What a linear layer reads must not be
  changed in place before W: that is refused.
* The engine draws parameters of two or more dimensions from seed and name and sets every "…bias" to
  0, so that weights do not depend on the cut. Other vectors keep what the constructor gave them,
  which must not be random.
"""

import zlib
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from terapipe.config import ModelConfig
from terapipe.engine.context import ContextPool, MaskSource, MicrobatchContext, SliceContext
from terapipe.engine.model import DecoderStage
from terapipe.engine.text import IGNORED
from terapipe.engine.weights import WeightQueue, attach
from terapipe.errors import RunError
from terapipe.schedule import Action, Kind
from terapipe.slicing import Slicing

WEIGHT_STD = 0.02  # of GPT-2 (Radford et al. 2019)


def build_module(
    model: ModelConfig,
    layers: range,
    seed: int,
    dtype: torch.dtype,
    path: str | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """The module of a range of layers, with weights that depend neither on the range nor on the device (default: CPU)."""
    kind: Any = DecoderStage
    if path is not None:
        module_name, _, class_name = path.partition(":")
        kind = import_module(module_name)
        for part in class_name.split("."):
            kind = getattr(kind, part)
    module: nn.Module = kind(model, layers, is_first=layers.start == 0, is_last=layers.stop == model.n_layers)
    draw_weights(module, seed)
    return module.to(device, dtype)  # drawn on the CPU: other devices' generators give other numbers


@torch.no_grad()
def draw_weights(module: nn.Module, seed: int) -> None:
    """Draw every matrix from N(0, 0.02²), by seed and name; biases are 0."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim >= 2:
            # A torch generator keeps 32 bits of its seed: mix both into those.
            state = np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(1)
            generator = torch.Generator().manual_seed(int(state[0]))
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, WEIGHT_STD, generator=generator))


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies (B, T, V) against (B, T) over labels that count, in float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class StepInputs(NamedTuple):
    """What a stage needs to know of a step: its slicing, batch, and keys of the dropout masks."""

    slicing: Slicing
    tokens: list[torch.Tensor]
    labels: list[torch.Tensor]
    n_valid: int
    seed: int
    step: int


class Stage:
    """Runs slices of one stage, keeping what their backwards need.

    With `splits_backward` its backward may also run as I and W, and B is I, then W. Without, the
    module is left as it is and B is autograd's own backward, so that schedules that never split pay
    nothing: a layer that queues costs a few microseconds more a call. A stage that does not train runs
    forwards only, in evaluation mode without dropout, and keeps nothing but the key/value context of
    microbatches under way.
    """

    def __init__(
        self,
        module: nn.Module,
        is_first: bool,
        is_last: bool,
        d_model: int,
        dtype: torch.dtype,
        splits_backward: bool = False,
        trains: bool = True,
    ) -> None:
        self.module, self.is_first, self.is_last, self.d_model, self.dtype = module, is_first, is_last, d_model, dtype
        self.trains = trains
        module.train(trains)
        self.pool = ContextPool()
        self.contexts: dict[int, MicrobatchContext] = {}
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.losses: list[torch.Tensor] = []
        self.weight_queue = WeightQueue() if splits_backward else None
        if self.weight_queue is not None:
            attach(module, self.weight_queue)

    def begin_step(self, inputs: StepInputs) -> None:
        """Take the step's batch; forget the last step's losses."""
        self.inputs = inputs
        self.losses = []

    def run(self, action: Action, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run F, B, I or W; return what the neighbouring stage needs, if there is one and anything."""
        microbatch, place = action.microbatch, action.slice
        if action.kind is Kind.W:
            self.weight_backward(microbatch, place)
            return None
        runs = {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.input_backward}
        with torch.set_grad_enabled(self.trains):
            return runs[action.kind](microbatch, place, received)

    def forward(self, microbatch: int, place: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run slice `place` of a microbatch; return its features (B, T, E), None on the last stage."""
        slices = self.inputs.slicing.microbatches[microbatch]
        start = slices.context_tokens[place]
        end = start + slices.slice_tokens[place]
        if self.is_first:
            features = self.inputs.tokens[microbatch][:, start:end]
        else:
            assert received is not None
            features = received.requires_grad_()
        if microbatch not in self.contexts:
            inputs = self.inputs
            masks = MaskSource(inputs.seed, inputs.step, microbatch, inputs.slicing.seq_tokens, drops=self.trains)
            self.contexts[microbatch] = MicrobatchContext(masks, self.pool)
        context = SliceContext(self.contexts[microbatch], start)
        outputs = self.module(features, torch.arange(start, end, device=features.device), context)
        if self.is_last:
            outputs = loss_sum(outputs, self.inputs.labels[microbatch][:, start:end]) / self.inputs.n_valid
            self.losses.append(outputs.detach())
        else:
            self._check(outputs, (slices.n_sequences, end - start, self.d_model))
        if self.trains:
            self.kept[microbatch, place] = (features, outputs)
        elif end == self.inputs.slicing.seq_tokens:
            self.contexts.pop(microbatch).release()
        return None if self.is_last else outputs.detach()

    def backward(self, microbatch: int, place: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run the backward; return the gradient of the slice's input (B, T, E), None on the first stage."""
        if self.weight_queue is None or not self.weight_queue.is_on:
            return self._backward(microbatch, place, received)
        gradient = self.input_backward(microbatch, place, received)
        self.weight_backward(microbatch, place)
        return gradient

    def input_backward(self, microbatch: int, place: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run the input-gradient half, I: all but the linear layers' weight gradients; returns what `backward` does."""
        assert self.weight_queue is not None
        self.weight_queue.begin((microbatch, place))
        gradient = self._backward(microbatch, place, received)
        self.weight_queue.end()
        return gradient

    def weight_backward(self, microbatch: int, place: int) -> None:
        """Run the weight-gradient half, W: add the products that the slice's I has queued."""
        assert self.weight_queue is not None
        self.weight_queue.run((microbatch, place))

    def _backward(self, microbatch: int, place: int, received: torch.Tensor | None) -> torch.Tensor | None:
        features, outputs = self.kept.pop((microbatch, place))
        outputs.backward(received)
        if place == 0:  # the microbatch's last: what W needs is in the queue
            self.contexts.pop(microbatch).release()
        return None if self.is_first else features.grad

    @property
    def loss(self) -> float:
        """The step's loss: the sum over valid tokens ÷ the batch's valid tokens (last stage only)."""
        return float(torch.stack(self.losses).sum())

    def _check(self, outputs: torch.Tensor, expected: tuple[int, int, int]) -> None:
        # gloo delivers any tensor into any buffer without a word, so a wrong one is caught here.
        if tuple(outputs.shape) != expected or outputs.dtype != self.dtype:
            raise RunError(
                f"{type(self.module).__name__}.forward returned features of shape {tuple(outputs.shape)} and {outputs.dtype}; "
                f"a stage of this run returns shape {expected} (sequences, slice tokens, d_model) of {self.dtype}."
            )
