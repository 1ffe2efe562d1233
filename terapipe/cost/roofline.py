"""What a slice costs at best: a model's kernels held against a device's limits, nothing measured.

Every layer is a short list of kernels. One takes the longest of three times: its floating-point
operations at the device's peak, its memory traffic at the device's bandwidth, and the launch floor
(Williams, Waterman, Patterson 2009, "Roofline"). Real kernels reach neither limit, so the times are
LOWER BOUNDS; `efficiency` lowers the peak.

What is counted, for b sequences, slice l, context c, width h (T = b·l tokens):

    matrix products    2·d_in·d_out·T operations; weights, inputs and outputs once through memory
    attention          4·h·b·l·(c + l/2) operations (causal, only pairs that are seen); as a fused
                       (flash-like) kernel: queries and outputs of the slice, keys and values of the
                       whole prefix, never the scores; its softmax is free
    norms, residuals, activation, rotation    traffic alone
    backward           input and weight halves of every product, each as many operations as its
                       forward; attention 2.5 times its forward (the scores are computed again)
    all-reduce         two a layer each way over `op_ranks` > 1, as a ring: 2(n−1)/n of the bytes

Not counted: embedding, head and loss, the optimizer, biases, what kernels of the same layer overlap.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from terapipe.config import ModelConfig
from terapipe.cost.device import Device
from terapipe.cost.model import CostModel, Numbers, Times, as_times
from terapipe.errors import CostError, as_number, check_integer

Floats = npt.NDArray[np.float64]
ATTENTION_BACKWARD = 2.5  # FlashAttention-2 (Dao 2023): five products where the forward has two
ALL_REDUCES = 2  # a layer and direction: after attention and after the feed-forward (Megatron-LM, 2019)


class Kernel(NamedTuple):
    """What one kernel computes and moves: for each token, each pair of tokens seen, each prefix token, and once."""

    flops_per_token: float = 0.0
    flops_per_pair: float = 0.0
    numbers_per_token: float = 0.0
    numbers_per_prefix_token: float = 0.0
    numbers_once: float = 0.0


class Counts(NamedTuple):
    """Tokens of a slice in all its sequences, pairs it attends to, and tokens of its prefix (context and slice)."""

    tokens: Floats
    pairs: Floats
    prefix: Floats


@dataclass(frozen=True)
class RooflineCost(CostModel):
    """Lower bounds on a slice's times from a model's shape and a device's figures; see the module.

    Parameters
    ----------
    model : ModelConfig
    device : Device or str
        A preset's name (`Device.preset`), or a device of your own.
    n_layers : int
        Layers of ONE stage.
    op_ranks : int
        Ranks that share every layer (Megatron-LM's tensor parallelism): heads and feed-forward are
        divided, norms and residuals are not.
    dtype_bytes : int, optional
        Bytes of a number; default: the smallest for which the device has a peak (2 on accelerators).
    efficiency : float
        Share of the peak that matrix products reach, 0 < efficiency ≤ 1; 1 gives the bound.

    Raises
    ------
    CostError
        For an unknown device, sizes below 1, `op_ranks` that do not divide heads and feed-forward.
    """

    model: ModelConfig
    device: Device | str
    n_layers: int = 1
    op_ranks: int = 1
    dtype_bytes: int | None = None
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelConfig):
            raise CostError(f"model={self.model!r}: needs a ModelConfig, e.g. ModelConfig.preset('gpt3-1b').")
        if not isinstance(self.device, Device):
            object.__setattr__(self, "device", Device.preset(self.device))
        for name in ("n_layers", "op_ranks"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1, CostError))
        if self.dtype_bytes is None:
            object.__setattr__(self, "dtype_bytes", min(self._device.peak_tflops))
        self._device.peak_flops(self._dtype_bytes)
        efficiency = as_number(self.efficiency)
        if not 0 < efficiency <= 1:
            raise CostError(f"efficiency={self.efficiency!r}: needs a number, 0 < efficiency ≤ 1.")
        object.__setattr__(self, "efficiency", efficiency)
        for name, size in (("n_heads", self.model.n_heads), ("n_kv_heads", self.model.kv_heads), ("d_ff", self.model.ff_dim)):
            if size % self.op_ranks:
                raise CostError(f"op_ranks={self.op_ranks} does not divide {name}={size}: each of them takes an equal part.")

    @property
    def _device(self) -> Device:
        assert isinstance(self.device, Device)
        return self.device

    @property
    def _dtype_bytes(self) -> int:
        assert self.dtype_bytes is not None
        return self.dtype_bytes

    def forward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Least time of the forward."""
        return self._stage_ms(self.forward_kernels, True, slice_tokens, context_tokens, n_sequences)

    def backward_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Least time of the full backward."""
        kernels = [*self.input_kernels, *self.weight_kernels]
        return self._stage_ms(kernels, True, slice_tokens, context_tokens, n_sequences)

    def weight_ms(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Least time of the weight gradients: those of the matrix products, as attention has no weights."""
        return self._stage_ms(self.weight_kernels, False, slice_tokens, context_tokens, n_sequences)

    def forward_flops(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        """Floating-point operations of the stage's forward on one of the op ranks, causal convention."""
        counts = _counts(slice_tokens, context_tokens, n_sequences)
        return self.n_layers * sum(kernel_flops(kernel, counts) for kernel in self.forward_kernels)

    @property
    def _products(self) -> list[tuple[float, float]]:
        """(d_in, d_out) of a layer's matrix products on one op rank: QKV, output, feed-forward in and out."""
        model, n = self.model, self.op_ranks
        kv_width, gates = model.kv_heads * model.head_dim, 2 if model.activation == "swiglu" else 1
        return [
            (model.d_model, (model.d_model + 2 * kv_width) / n),
            (model.d_model / n, model.d_model),
            (model.d_model, gates * model.ff_dim / n),
            (model.ff_dim / n, model.d_model),
        ]

    @property
    def forward_kernels(self) -> list[Kernel]:
        """The kernels of one layer's forward."""
        model, n = self.model, self.op_ranks
        width, kv_width = model.d_model / n, model.kv_heads * model.head_dim / n
        gates = 2 if model.activation == "swiglu" else 1
        attention = Kernel(flops_per_pair=4 * width, numbers_per_token=2 * width, numbers_per_prefix_token=2 * kv_width)
        traffic: list[float] = [2 * model.d_model, 3 * model.d_model] * 2  # norm: read, write; residual: read two, write
        traffic.append((gates + 1) * model.ff_dim / n)  # activation
        if model.position == "rotary":
            traffic.append(2 * (width + kv_width))
        return [*map(_product, self._products), attention, *(Kernel(numbers_per_token=numbers) for numbers in traffic)]

    @property
    def input_kernels(self) -> list[Kernel]:
        """The kernels of one layer's input gradients."""
        model, n = self.model, self.op_ranks
        width, kv_width = model.d_model / n, model.kv_heads * model.head_dim / n
        gates = 2 if model.activation == "swiglu" else 1
        attention = Kernel(  # reads q, o, their gradient, k, v; writes the gradients of q, k, v
            flops_per_pair=ATTENTION_BACKWARD * 4 * width,
            numbers_per_token=4 * width,
            numbers_per_prefix_token=4 * kv_width,
        )
        traffic: list[float] = [3 * model.d_model, 3 * model.d_model] * 2  # norm: input and gradient; residual: gradients added
        traffic.append((2 * gates + 1) * model.ff_dim / n)
        if model.position == "rotary":
            traffic.append(2 * (width + kv_width))
        return [*map(_product, self._products), attention, *(Kernel(numbers_per_token=numbers) for numbers in traffic)]

    @property
    def weight_kernels(self) -> list[Kernel]:
        """The kernels of one layer's weight gradients."""
        return [_product(sizes) for sizes in self._products]

    def _stage_ms(self, kernels: list[Kernel], communicates: bool, slices: Numbers, contexts: Numbers, n: Numbers) -> Times:
        counts = _counts(slices, contexts, n)
        times = np.zeros(np.shape(counts.pairs))
        for kernel in kernels:
            times += self._kernel_ms(kernel, counts)
        if communicates and self.op_ranks > 1:
            times += ALL_REDUCES * self._all_reduce_ms(counts)
        return as_times(times * self.n_layers, slices, contexts, n)

    def _kernel_ms(self, kernel: Kernel, counts: Counts) -> Floats:
        device = self._device
        computing = kernel_flops(kernel, counts) / (device.peak_flops(self._dtype_bytes) * self.efficiency / 1e3)
        numbers = (
            kernel.numbers_per_token * counts.tokens + kernel.numbers_per_prefix_token * counts.prefix + kernel.numbers_once
        )
        moving = numbers * self._dtype_bytes / (device.memory_gb_s * 1e6)
        return np.maximum(np.maximum(computing, moving), device.launch_us / 1e3)

    def _all_reduce_ms(self, counts: Counts) -> Floats:
        n_bytes = counts.tokens * self.model.d_model * self._dtype_bytes
        ring = 2 * (self.op_ranks - 1) / self.op_ranks * n_bytes / (self._device.op_gb_s * 1e6)
        return ring + self._device.op_latency_us / 1e3


def kernel_flops(kernel: Kernel, counts: Counts) -> Floats:
    """Floating-point operations of a kernel; a multiplication and its addition are two."""
    return kernel.flops_per_token * counts.tokens + kernel.flops_per_pair * counts.pairs


def _product(sizes: tuple[float, float]) -> Kernel:
    """A matrix product, or one half of its backward: three matrices, of which any two make the third."""
    d_in, d_out = sizes
    return Kernel(flops_per_token=2 * d_in * d_out, numbers_per_token=d_in + d_out, numbers_once=d_in * d_out)


def _counts(slices: Numbers, contexts: Numbers, sequences: Numbers) -> Counts:
    lengths, before, n = (np.asarray(value, dtype=np.float64) for value in (slices, contexts, sequences))
    tokens, prefix = n * lengths, n * (before + lengths)
    return Counts(tokens, tokens * (before + lengths / 2), prefix)
