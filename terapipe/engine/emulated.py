"""A stage that sleeps instead of computing: an emulated accelerator.

Real processes and real messages at true concurrency, for more ranks than there are cores. What an
action costs was put in; what it shows is the order and the runtime.
"""

import time

import numpy as np
import torch

from terapipe.cost import CostModel
from terapipe.engine.host import sharpen_timer
from terapipe.engine.stage import StepInputs
from terapipe.schedule import Action, Kind


class EmulatedStage:
    """Sleeps for the modelled time of each action and returns zeros of the right shape."""

    def __init__(self, cost: CostModel, is_first: bool, is_last: bool, d_model: int, dtype: torch.dtype) -> None:
        self.cost, self.is_first, self.is_last, self.d_model, self.dtype = cost, is_first, is_last, d_model, dtype
        self.slicing: object = None
        sharpen_timer()

    def begin_step(self, inputs: StepInputs) -> None:
        """Look up the step's durations."""
        self.first_units = inputs.slicing.first_units
        if inputs.slicing == self.slicing:
            return
        self.slicing = inputs.slicing
        units = inputs.slicing.units[:, 2:].T
        self.shapes = [(int(b), int(length), self.d_model) for length, _, b in units.T]
        self.outputs = {shape: torch.zeros(shape, dtype=self.dtype) for shape in set(self.shapes)}
        functions = {
            Kind.F: self.cost.forward_ms,
            Kind.B: self.cost.backward_ms,
            Kind.I: self.cost.input_ms,
            Kind.W: self.cost.weight_ms,
        }
        self.seconds = {kind: np.asarray(function(*units)) / 1e3 for kind, function in functions.items()}

    def run(self, action: Action, received: torch.Tensor | None) -> torch.Tensor | None:
        """Sleep until the action's modelled end."""
        end = time.perf_counter()
        unit = self.first_units[action.microbatch] + action.slice
        end += float(self.seconds[action.kind][unit])
        time.sleep(max(0.0, end - time.perf_counter()))
        at_end = self.is_last if action.kind is Kind.F else self.is_first
        return None if at_end or action.kind is Kind.W else self.outputs[self.shapes[unit]]
