"""The queue of weight-gradient products that one stage's input-gradient backwards leave for its W actions.

A linear layer's backward is two products: the gradient of its input, which the stage before waits
for, and that of its weight, which nobody waits for before the step's end. Here the first is made in
I; what the second needs, the layer's input and its output's gradient, is queued under the slice's
microbatch and place until W adds the products to the gradients. Everything else (norms, embeddings,
attention, which has no weight) is done in I. Zero Bubble (Qi et al., ICLR 2024), section 2.

Knows no slices, ranks or order: a unit is whatever key the stage names.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from terapipe.errors import RunError


class Product:
    """The weight and bias gradients of one application of a linear layer, not made yet.

    Rows of all dimensions but the last are one: inputs (N, I), gradient of the outputs (N, O),
    weight (O, I), bias (O,).
    """

    def __init__(
        self, inputs: torch.Tensor | None, gradient: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        self.inputs, self.gradient, self.weight, self.bias = inputs, gradient, weight, bias
        self.kept = [tensor for tensor in (inputs, gradient) if tensor is not None]
        self.versions = [tensor._version for tensor in self.kept]

    def add(self) -> None:
        """Add the gradients, where a parameter has none yet as its first."""
        if [tensor._version for tensor in self.kept] != self.versions:
            raise RunError(
                "a tensor that a weight gradient needs was changed in place between I and W: the input of a linear layer, "
                "or the gradient of its output. Give the layer a copy (.clone()) of what your stage writes to."
            )
        if self.weight is not None:
            assert self.inputs is not None
            if self.weight.grad is None:
                self.weight.grad = self.gradient.t() @ self.inputs
            else:
                self.weight.grad.addmm_(self.gradient.t(), self.inputs)
        if self.bias is not None:
            total = self.gradient.sum(0)
            self.bias.grad = total if self.bias.grad is None else self.bias.grad.add_(total)


class WeightQueue:
    """Products by unit, from the unit's I to its W."""

    def __init__(self) -> None:
        self.products: dict[Hashable, list[Product]] = {}
        self.unit: Hashable | None = None  # whose I is running
        self.is_on = True  # off: layers are torch's own until it is on again

    @property
    def n_bytes(self) -> int:
        """Bytes that the queue keeps alive; what layers share (the input of query, key and value) counts once."""
        storages = [tensor.untyped_storage() for each in self.products.values() for product in each for tensor in product.kept]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def begin(self, unit: Hashable) -> None:
        """What backwards queue from now on is this unit's."""
        self.unit = unit
        self.products[unit] = []

    def end(self) -> None:
        """The unit's I is done."""
        self.unit = None

    def push(self, product: Product) -> None:
        """Queue a product of the unit whose I is running."""
        self.products[self.unit].append(product)

    @torch.no_grad()
    def run(self, unit: Hashable) -> None:
        """Add a unit's products to the gradients, in the order in which they were queued, and let go of them."""
        for product in self.products.pop(unit):
            product.add()


class _Linear(torch.autograd.Function):
    """functional.linear, whose backward makes the input's gradient and queues the rest.

    The queue comes with the call: on CUDA backwards run on a thread of their own, which sees no
    state of the thread that ran the forward.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, queue: WeightQueue
    ) -> torch.Tensor:
        needs_inputs, needs_weight, needs_bias, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if needs_weight else None, weight if needs_inputs else None)
        ctx.parameters = (weight if needs_weight else None, bias if needs_bias else None)
        ctx.queue = queue
        return functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        inputs, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        if any(parameter is not None for parameter in ctx.parameters):
            # A view may be of rows that are written again before W: the context's buffer of gradients.
            own = rows if rows._base is None else rows.clone()
            ctx.queue.push(Product(inputs if inputs is None else inputs.reshape(-1, inputs.shape[-1]), own, *ctx.parameters))
        return None if weight is None else (rows @ weight).view(*gradient.shape[:-1], weight.shape[1]), None, None, None


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, queue: WeightQueue | None = None
) -> torch.Tensor:
    """functional.linear: inputs (…, I), weight (O, I), bias (O,) → (…, O); with a queue, its backward is in two halves.

    Without one it is torch's own. So it is where the product cannot wait: under autocast or a
    compiler, and where autograd has more to do with the parameters than to add to their gradients
    (computed weights, hooks).
    """
    if queue is None or not queue.is_on or not _can_wait(inputs, weight, bias):
        return functional.linear(inputs, weight, bias)
    outputs: torch.Tensor = _Linear.apply(inputs, weight, bias, queue)  # type: ignore[no-untyped-call]
    return outputs


def _can_wait(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return (
        not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(inputs.device.type)
        and weight.is_floating_point()
        and all(
            type(each) is nn.Parameter and not (each._backward_hooks or each._post_accumulate_grad_hooks)
            for each in (weight, bias)
            if each is not None
        )
    )


@runtime_checkable
class HasQueue(Protocol):
    """A module that takes the stage's queue, for calls of `linear` of its own."""

    weight_queue: WeightQueue | None


def attach(module: nn.Module, queue: WeightQueue) -> None:
    """Have the linear layers of a stage use the queue, and give it to modules that have a `weight_queue`.

    A linear layer is an nn.Linear, also a subclass's, whose forward is nn.Linear's own.
    """
    for each in module.modules():
        if isinstance(each, nn.Linear) and type(each).forward is nn.Linear.forward and "forward" not in vars(each):
            each.forward = partial(_forward, each, queue)  # type: ignore[method-assign]
        if isinstance(each, HasQueue):
            each.weight_queue = queue


def _forward(module: nn.Linear, queue: WeightQueue, input: torch.Tensor) -> torch.Tensor:  # named as nn.Linear names it
    return linear(input, module.weight, module.bias, queue)
