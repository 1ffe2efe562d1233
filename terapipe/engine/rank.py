"""One rank's part of one run: its stages and optimizer, a step at a time, and the files it leaves."""

import csv
import os
from pathlib import Path

import numpy as np
import torch

from terapipe.engine.emulated import EmulatedStage
from terapipe.engine.ledger import Ledger
from terapipe.engine.mesh import Mesh
from terapipe.engine.optimizer import Optimizer
from terapipe.engine.results import LOSS_COLUMNS, RANK_COLUMNS, read_schedules
from terapipe.engine.runtime import Fault, RunsSlices, Runtime, TimedAction
from terapipe.engine.stage import Stage, StepInputs, build_module
from terapipe.engine.text import Batch, read_batch
from terapipe.schedule import Kind, Schedule
from terapipe.spec import RunSpec
from terapipe.timeline import MEMORY_COLUMNS


class RankRun:
    """Runs steps −n_warmup_steps … n_steps−1 of one spec on this rank."""

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        self.mesh, self.directory = mesh, directory
        self.spec = RunSpec.from_json((directory / "spec.json").read_text("utf-8"))
        self.dtype: torch.dtype = getattr(torch, self.spec.dtype)
        self.schedules = read_schedules(directory, self.spec)
        self.homes = self.schedules[0].stage_to_rank
        self.emulated = self.spec.device == "emulated"
        self.stages: dict[int, RunsSlices] = {
            stage: self._build_stage(stage) for stage, home in enumerate(self.homes) if home == mesh.rank
        }
        computing = [stage for stage in self.stages.values() if isinstance(stage, Stage)]
        modules = [stage.module for stage in computing]
        self.optimizer = (
            Optimizer(mesh, modules, self.spec.learning_rate, self.spec.clip_grad_norm) if not self.emulated else None
        )
        self.ledger = Ledger(computing) if self.spec.measure_memory else None
        self.runtimes = [
            Runtime(mesh, schedule, self.stages, self.spec.model.d_model, self.dtype, self.spec.link, self.ledger)
            for schedule in self.schedules
        ]
        fault = Fault.from_environment()
        self.fault = fault if fault is not None and fault.rank == mesh.rank else None
        self.timings = (directory / f"timings-rank-{mesh.rank}.csv").open("w", newline="", encoding="utf-8")
        csv.writer(self.timings).writerow(RANK_COLUMNS)
        self.memory = None
        if self.ledger is not None:
            self.memory = (directory / f"memory-rank-{mesh.rank}.csv").open("w", newline="", encoding="utf-8")
            csv.writer(self.memory).writerow(MEMORY_COLUMNS)
        self.losses = None
        if self.homes[-1] == mesh.rank:
            self.losses = (directory / "losses.csv").open("w", newline="", encoding="utf-8")
            csv.writer(self.losses).writerow(LOSS_COLUMNS)

    def _build_stage(self, stage: int) -> RunsSlices:
        spec, is_first, is_last = self.spec, stage == 0, stage == self.spec.n_stages - 1
        if self.emulated:
            return EmulatedStage(spec.stage_costs[stage], is_first, is_last, spec.model.d_model, self.dtype)
        return build_stage(spec, stage)

    @property
    def steps(self) -> range:
        """Step numbers; warm-up steps are below 0."""
        return range(-self.spec.n_warmup_steps, self.spec.n_steps)

    def run_step(self, step: int, save: str | None = None) -> None:
        """Run one step and write its rows; with save="gradients" keep the gradients instead of updating."""
        which = self.spec.slicing_index(step)
        inputs = step_inputs(self.spec, step)
        origin, timed = self.runtimes[which].run_step(inputs, self._armed(step))
        self._write_memory(step, origin, timed)
        norm = float("nan")
        if self.optimizer is not None and save == "gradients":
            self.optimizer.reduce_shared()
            self._save(f"gradients-{step}", {name: p.grad for name, p in self.optimizer.parameters.items()})
            self.optimizer.clear()
        elif self.optimizer is not None and self.spec.trains:
            norm = self.optimizer.step()
        self._write_timings(step, self.schedules[which], origin, timed)
        if self.losses is not None:
            last = self.stages[len(self.homes) - 1]
            csv.writer(self.losses).writerow([step, last.loss if isinstance(last, Stage) else float("nan"), norm])
            self.losses.flush()

    def save_parameters(self) -> None:
        """Write this rank's parameters."""
        assert self.optimizer is not None
        self._save("parameters", dict(self.optimizer.parameters))

    def close(self) -> None:
        """Close the files."""
        self.timings.close()
        if self.memory is not None:
            self.memory.close()
        if self.losses is not None:
            self.losses.close()

    def _armed(self, step: int) -> Fault | None:
        return self.fault if step == min(1, self.spec.n_steps - 1) else None

    def _save(self, name: str, tensors: dict[str, torch.Tensor | None]) -> None:
        arrays = {key: tensor.detach().numpy() for key, tensor in tensors.items() if tensor is not None}
        np.savez(self.directory / f"{name}-rank-{self.mesh.rank}.npz", allow_pickle=False, **arrays)

    def _write_memory(self, step: int, origin: int, timed: list[TimedAction]) -> None:
        if self.ledger is None or self.memory is None:
            return
        ends = [f"{(action.end_ns - origin) / 1e6:.6f}" for action in timed]
        rows = [[step, self.mesh.rank, end, *held] for end, held in zip(ends, self.ledger.take_rows(), strict=True)]
        csv.writer(self.memory).writerows(rows)
        self.memory.flush()

    def _write_timings(self, step: int, schedule: Schedule, origin: int, timed: list[TimedAction]) -> None:
        units, firsts = schedule.slicing.units, schedule.slicing.first_units
        rows = []
        for action, start, end, ready, n_bytes in timed:
            length, context, sequences = units[firsts[action.microbatch] + action.slice][2:]
            times = [f"{(time - origin) / 1e6:.6f}" if time else "" for time in (start, end, ready)]
            place = [step, self.mesh.rank, action.stage, action.kind.value, action.microbatch, action.slice]
            rows.append([*place, sequences, length, context, *times, n_bytes])
        csv.writer(self.timings).writerows(rows)
        self.timings.flush()
        os.fsync(self.timings.fileno())


def build_stage(spec: RunSpec, stage: int, device: torch.device | None = None, splits_backward: bool | None = None) -> Stage:
    """One stage of a run that computes; its tensors live where its module does.

    Its backward can be split where a schedule of the run splits it, unless `splits_backward` says.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    path = spec.stage if spec.stage is None else str(spec.stage)
    module = build_module(spec.model, spec.layer_ranges[stage], spec.seed, dtype, path, device)
    splits = any(splits_stage(schedule, stage) for schedule in spec.schedules) if splits_backward is None else splits_backward
    return Stage(module, stage == 0, stage == spec.n_stages - 1, spec.model.d_model, dtype, splits, spec.trains)


def splits_stage(schedule: Schedule, stage: int) -> bool:
    """Whether a schedule has the stage's backward in two halves, I and W, for any slice."""
    return any(action.kind is Kind.W for action in schedule.orders[schedule.stage_to_rank[stage]] if action.stage == stage)


def step_inputs(spec: RunSpec, step: int) -> StepInputs:
    """Slicing, batch and keys of one step, the same on every rank and in one process."""
    slicing = spec.slicings[spec.slicing_index(step)]
    batch = Batch([], [])
    if spec.device != "emulated":
        text = None if spec.text is None else str(spec.text)
        batch = read_batch(text, spec.model.vocab_size, slicing, step + spec.n_warmup_steps)
    return StepInputs(slicing, batch.tokens, batch.labels, batch.n_valid, spec.seed, step)
