"""A stage that sleeps instead of computing: an emulated accelerator.

Real processes and real messages at true concurrency, for more ranks than there are cores. What an
action costs was put in; what it shows is the order and the runtime.
"""

import os
import time

import numpy as np
import torch

from terapipe.cost import CostModel
from terapipe.engine.host import sharpen_timer
from terapipe.engine.stage import StepInputs
from terapipe.schedule import Action, Kind

# A sleeper wakes some 0.1 to 0.4 ms late, so the end of an action is waited for awake; little of it, as ranks share cores.
AWAKE_S, AWAKE_SHARE = 250e-6, 0.03
give_way = getattr(os, "sched_yield", lambda: None)  # to ranks that are at work on the same core


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
        start = time.perf_counter()
        unit = self.first_units[action.microbatch] + action.slice
        seconds = float(self.seconds[action.kind][unit])
        awake = min(AWAKE_S, AWAKE_SHARE * seconds)
        time.sleep(max(0.0, start + seconds - awake - time.perf_counter()))
        while time.perf_counter() < start + seconds:
            give_way()
        at_end = self.is_last if action.kind is Kind.F else self.is_first
        return None if at_end or action.kind is Kind.W else self.outputs[self.shapes[unit]]
