"""What `peers.py` races, seen from a rank: a step of this engine, and one of torch.distributed.pipelining.

Both run the same modules on the same tokens, in the same processes, on one thread a rank. Neither
has an optimizer; gradients are cleared outside the timed part.
"""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from terapipe.engine import worker
from terapipe.engine.context import MaskSource, WholeContext
from terapipe.engine.control import Telephone
from terapipe.engine.host import keep_memory
from terapipe.engine.mesh import Mesh, PeerLostError
from terapipe.engine.probe import PROBE, Prober
from terapipe.engine.rank import build_stage, step_inputs
from terapipe.engine.runtime import Runtime
from terapipe.engine.stage import Stage, loss_sum
from terapipe.engine.verify import FLOOR
from terapipe.spec import RunSpec

# The schedule there that runs a family's order, or the nearest to it.
PEERS: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,  # of one stage a rank
    "zbv": schedules.ScheduleZBVZeroBubble,
}

Gradients = dict[str, torch.Tensor]


class Times(NamedTuple):
    """One step of one rank, in nanoseconds.

    From the ranks' common start; CPU time of the thread that computes, which waiting does not add to;
    and within compute actions (0 where unknown).
    """

    step_ns: int
    cpu_ns: int
    busy_ns: int


class NotedMesh(Mesh):
    """A mesh that notes when this rank was ready to start."""

    ready_ns = 0

    def start_together(self) -> int:
        self.ready_ns = time.perf_counter_ns()
        return super().start_together()


class Ours:
    """A step of this engine's runtime."""

    def __init__(self, mesh: NotedMesh, spec: RunSpec) -> None:
        self.mesh, schedule = mesh, spec.schedules[0]
        self.inputs = step_inputs(spec, 0)
        self.stages: dict[int, Stage] = {
            stage: build_stage(spec, stage) for stage, home in enumerate(schedule.stage_to_rank) if home == mesh.rank
        }
        self.modules = {stage: each.module for stage, each in self.stages.items()}
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self.runtime = Runtime(mesh, schedule, self.stages, spec.model.d_model, dtype)

    def step(self) -> Times:
        """Run a step. What the runtime does before the common start counts: its peer does the like after it."""
        called, cpu = time.perf_counter_ns(), time.thread_time_ns()
        origin, timed = self.runtime.run_step(self.inputs)
        ended, cpu = time.perf_counter_ns(), time.thread_time_ns() - cpu
        busy = sum(action.end_ns - action.start_ns for action in timed)
        return Times(ended - origin + self.mesh.ready_ns - called, cpu, busy)

    def loss(self) -> float | None:
        """The last step's loss, where the last stage lives."""
        return next((stage.loss for stage in self.stages.values() if stage.is_last), None)


class Whole(nn.Module):
    """A stage's module behind the interface that torch.distributed.pipelining calls: one tensor in, one out."""

    def __init__(self, module: nn.Module, seq_tokens: int) -> None:
        super().__init__()
        self.module, self.positions = module, torch.arange(seq_tokens)
        self.context = WholeContext(MaskSource(0, 0, 0, seq_tokens))  # no masks are drawn: the model has no dropout

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.module(inputs, self.positions, self.context)
        return outputs


class Theirs:
    """A step of torch.distributed.pipelining."""

    def __init__(self, mesh: NotedMesh, spec: RunSpec) -> None:
        self.mesh, schedule = mesh, spec.schedules[0]
        self.modules = {
            stage: build_stage(spec, stage, splits_backward=False).module  # torch splits any module's backward itself
            for stage, home in enumerate(schedule.stage_to_rank)
            if home == mesh.rank
        }
        group = mesh.group_of(tuple(range(mesh.n_ranks)))
        stages = [
            pipelining.PipelineStage(
                Whole(module, schedule.slicing.seq_tokens), stage, spec.n_stages, torch.device("cpu"), group=group
            )
            for stage, module in self.modules.items()
        ]
        inputs = step_inputs(spec, 0)
        self.losses: list[torch.Tensor] = []
        self.tokens = (torch.cat(inputs.tokens),) if 0 in self.modules else ()
        self.labels = torch.cat(inputs.labels) if spec.n_stages - 1 in self.modules else None
        kind = PEERS[spec.schedule_name]
        self.schedule = kind(
            stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages,
            n_microbatches=len(schedule.slicing.microbatches),
            loss_fn=lambda logits, labels: loss_sum(logits, labels) / inputs.n_valid,
            scale_grads=False,  # the loss is divided already
        )

    def step(self) -> Times:
        """Run a step; whole logits are not gathered, as they are not here."""
        cpu = time.thread_time_ns()
        origin = self.mesh.start_together()
        self.schedule.step(*self.tokens, target=self.labels, losses=self.losses, return_outputs=False)
        return Times(time.perf_counter_ns() - origin, time.thread_time_ns() - cpu, 0)

    def loss(self) -> float | None:
        """The last step's loss, where the last stage lives."""
        return float(torch.stack(self.losses).detach().sum()) if self.losses else None


Contender = Ours | Theirs
CONTENDERS: dict[str, Callable[[NotedMesh, RunSpec], Contender]] = {"ours": Ours, "theirs": Theirs}


def race(mesh: NotedMesh, job: dict[str, Any], report: worker.Report) -> dict[str, Any]:
    """Run steps of job["contenders"], pairs (whose, run directory), in job["order"], where `PROBE` measures slices instead.

    Returns every contender's `Times`, step after step, and how far its first step's gradients and loss
    are from those of the first contender (see `compare`).
    """
    contenders = [
        CONTENDERS[whose](mesh, RunSpec.from_json((Path(directory) / "spec.json").read_text("utf-8")))
        for whose, directory in job["contenders"]
    ]
    prober = Prober.of(mesh, job["probe"])
    prober.warm_up()
    errors = compare(mesh, contenders)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in the middle of a step would be timed
    times: list[list[Times]] = [[] for _ in contenders]
    for index in job["order"]:
        if index == PROBE:
            prober.measure()
        else:
            clear(contenders[index])
            times[index].append(contenders[index].step())
        gc.collect()
        if mesh.rank == 0:
            report({"event": "step"})
    gc.enable()
    gc.unfreeze()
    prober.close()
    return {"times": times, "errors": errors}


def clear(contender: Contender) -> None:
    """Drop the gradients."""
    for module in contender.modules.values():
        module.zero_grad()


def compare(mesh: Mesh, contenders: list[Contender]) -> list[float]:
    """How far each contender's gradients and loss are from the first one's.

    max|Δ| ÷ max(max|first|, 10⁻³ · the model's largest gradient), the largest over all parameters of
    all ranks, and the loss's relative error.
    """
    found: list[tuple[Gradients, float | None]] = []
    for contender in contenders:
        clear(contender)
        contender.step()
        found.append((gradients(contender), contender.loss()))
    expected, loss = found[0]
    floor = FLOOR * max(mesh.gather(max(float(each.abs().max()) for each in expected.values())))
    errors = []
    for held, its_loss in found:
        assert held.keys() == expected.keys()
        here = [float((held[name] - each).abs().max()) / max(float(each.abs().max()), floor) for name, each in expected.items()]
        if loss is not None and its_loss is not None:
            here.append(abs(its_loss / loss - 1))
        errors.append(max(mesh.gather(max(here))))
    return errors


def gradients(contender: Contender) -> Gradients:
    """A copy of every gradient, by stage and name."""
    return {
        f"{stage}.{name}": parameter.grad.clone()
        for stage, module in contender.modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def serve(rank: int, n_ranks: int, store_port: int, line: str) -> None:
    """Entry point of a rank: races, and the jobs that the engine's own ranks do, until it is told to stop."""
    telephone = Telephone(line)
    try:
        torch.set_num_threads(worker.N_THREADS)
        keep_memory()
        store = torch.distributed.TCPStore("127.0.0.1", store_port, is_master=False, timeout=worker.STORE_TIMEOUT)
        mesh = NotedMesh(store, rank, n_ranks)
        telephone.say({"event": "ready"})
        while (job := telephone.next_job())["do"] != "stop":
            do = race if job["do"] == "race" else worker.do_job
            telephone.say({"event": "done", "result": do(mesh, job, telephone.say)})
        mesh.close()
    except BaseException as error:
        told = {"type": type(error).__name__, "message": str(error), "echo": isinstance(error, PeerLostError)}
        telephone.say({"event": "failed", **told})
        raise
