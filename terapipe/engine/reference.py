"""The same step in one process, unsliced and unpipelined: what every run is held against.

It runs the same modules, without the key/value context, the schedule or any message.
"""

import time
from typing import Any

import torch
from torch import nn

from terapipe.engine.context import MaskSource, WholeContext
from terapipe.engine.rank import step_inputs
from terapipe.engine.stage import StepInputs, build_module, loss_sum
from terapipe.spec import RunSpec

MEASURED_STEP = 0


def build_reference(spec: RunSpec) -> nn.Module:
    """The whole model of a run, as it starts; in evaluation mode where the run trains nothing."""
    path = None if spec.stage is None else str(spec.stage)
    module = build_module(spec.model, range(spec.model.n_layers), spec.seed, getattr(torch, spec.dtype), path)
    return module.train(spec.trains)


def reference_step(module: nn.Module, inputs: StepInputs) -> float:
    """Forward and backward of a step's whole sequences; adds to the gradients, returns the loss.

    A module in evaluation mode drops nothing.
    """
    total = 0.0
    positions = torch.arange(inputs.slicing.seq_tokens)
    for microbatch, (tokens, labels) in enumerate(zip(inputs.tokens, inputs.labels, strict=True)):
        masks = MaskSource(inputs.seed, inputs.step, microbatch, inputs.slicing.seq_tokens, drops=module.training)
        logits = module(tokens, positions, WholeContext(masks))
        loss = loss_sum(logits, labels) / inputs.n_valid
        loss.backward()
        total += loss.item()
    return total


def train_reference(spec: RunSpec) -> tuple[nn.Module, float]:
    """All steps of a run in one process; the trained model and its last loss."""
    module = build_reference(spec)
    adam = torch.optim.AdamW(module.parameters(), lr=spec.learning_rate)
    loss = 0.0
    for step in range(-spec.n_warmup_steps, spec.n_steps):
        adam.zero_grad()
        loss = reference_step(module, step_inputs(spec, step))
        if spec.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), spec.clip_grad_norm)
        adam.step()
    return module, loss


def time_reference(spec: RunSpec, n_repeats: int) -> dict[str, Any]:
    """Milliseconds of forward and backward of one step in this process, with the threads it has."""
    module, inputs = build_reference(spec), step_inputs(spec, MEASURED_STEP)
    times = []
    for _ in range(n_repeats + 1):
        start = time.perf_counter()
        reference_step(module, inputs)
        times.append((time.perf_counter() - start) * 1e3)
    return {"step_ms": times[1:], "n_threads": torch.get_num_threads()}
