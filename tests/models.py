"""Small models, and a pipeline whose stages all live in this process: what the engine's tests share."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import terapipe as tp
from terapipe.config import split_layers
from terapipe.engine.optimizer import share_parameters
from terapipe.engine.reference import reference_step
from terapipe.engine.stage import Stage, StepInputs, build_module
from terapipe.engine.text import IGNORED, read_batch

torch.set_num_threads(1)  # tensors this small are done before a second thread has woken

Gradients = dict[str, torch.Tensor]


def small_model(**changes: Any) -> tp.ModelConfig:
    """4 layers, 32 features in 4 heads, 61 tokens known, at most 64 in a sequence."""
    return tp.ModelConfig(**({"n_layers": 4, "d_model": 32, "n_heads": 4, "vocab_size": 61, "max_seq_tokens": 64} | changes))


VARIANTS: dict[str, tp.ModelConfig] = {
    "swiglu": small_model(activation="swiglu", d_ff=48),
    "rmsnorm": small_model(norm="rmsnorm"),
    "no bias": small_model(bias=False),
    "grouped-query": small_model(n_kv_heads=2),
    "one key/value head, rotary": small_model(n_kv_heads=1, position="rotary"),
    "as Llama": small_model(
        n_kv_heads=2, activation="swiglu", norm="rmsnorm", bias=False, position="rotary", tied_embedding=False, d_ff=48
    ),
}


class Pipeline:
    """Every stage of a model in one process; features and gradients are passed by hand."""

    def __init__(
        self,
        model: tp.ModelConfig,
        layers_per_stage: Sequence[int],
        dtype: torch.dtype = torch.float64,
        path: str | None = None,
        splits: Sequence[bool] | None = None,
    ) -> None:
        ranges = split_layers(model.n_layers, len(layers_per_stage), layers_per_stage)
        modules = [build_module(model, layers, 0, dtype, path) for layers in ranges]
        self.parameters = share_parameters(modules)
        last = len(modules) - 1
        self.stages = [
            Stage(module, index == 0, index == last, model.d_model, dtype, splits is not None and splits[index])
            for index, module in enumerate(modules)
        ]

    def forward(self, microbatch: int, place: int) -> None:
        """One slice through all stages."""
        features = None
        for stage in self.stages:
            features = stage.forward(microbatch, place, features)

    def backward(self, microbatch: int, place: int) -> None:
        """One slice back through all stages."""
        gradient = None
        for stage in reversed(self.stages):
            gradient = stage.backward(microbatch, place, gradient)

    def run(self, inputs: StepInputs) -> tuple[float, Gradients]:
        """A step in TeraPipe's order; its loss, and the gradients of this step alone."""
        for stage in self.stages:
            stage.begin_step(inputs)
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        units = [(int(microbatch), int(place)) for microbatch, place in inputs.slicing.units[:, :2]]
        for unit in units:
            self.forward(*unit)
        for unit in reversed(units):
            self.backward(*unit)
        return self.stages[-1].loss, {name: parameter.grad for name, parameter in self.parameters.items()}


def make_inputs(model: tp.ModelConfig, slicing: str, labels: Sequence[torch.Tensor] | None = None, step: int = 0) -> StepInputs:
    """A step's inputs of real text; labels of your own count where they are not −100."""
    cut = tp.Slicing.parse(slicing)
    batch = read_batch(None, model.vocab_size, cut, step)
    given = batch.labels if labels is None else list(labels)
    n_valid = sum(int((each != IGNORED).sum()) for each in given)
    return StepInputs(cut, batch.tokens, given, n_valid, seed=0, step=step)


def run_whole(model: tp.ModelConfig, inputs: StepInputs, dtype: torch.dtype = torch.float64) -> tuple[float, Gradients]:
    """The same step by the unsliced, uncut model."""
    module = build_module(model, range(model.n_layers), 0, dtype)
    loss = reference_step(module, inputs)
    return loss, {name: parameter.grad for name, parameter in module.named_parameters()}


def worst_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """max|Δ| ÷ max|reference| of the worst tensor; infinite where names differ or a number is none.

    Tensors under a thousandth of the largest are measured against that: a key bias's true gradient is 0.
    """
    if found.keys() != expected.keys():
        return float("inf")
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in expected.values())
    errors = [
        float((found[name] - tensor).abs().max()) / max(float(tensor.abs().max()), floor) for name, tensor in expected.items()
    ]
    return max(error if error == error else float("inf") for error in errors)
