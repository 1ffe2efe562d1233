"""What a run refuses, each with the value, what is allowed and what to do."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from terapipe.config import ModelConfig
from terapipe.cost import CostModel, Link, check_links, find_link
from terapipe.errors import ScheduleError, SlicingError, SpecError, check_integer, unknown_name
from terapipe.schedule import Schedule
from terapipe.spec.costs import visited_costs

if TYPE_CHECKING:
    from terapipe.spec.spec import RunSpec

DTYPES = ("float32", "float64")
DEVICES = ("cpu", "cuda", "emulated")


def check_values(spec: "RunSpec") -> None:
    """Every field on its own."""
    if not isinstance(spec.model, ModelConfig):
        raise SpecError(f"model={spec.model!r}: needs a ModelConfig, e.g. ModelConfig.preset('tour').")
    for name, least in (("n_ranks", 1), ("n_steps", 1), ("n_warmup_steps", 0), ("seed", 0)):
        check_integer(name, getattr(spec, name), least, SpecError)
    if spec.chunks_per_rank is not None:
        check_integer("chunks_per_rank", spec.chunks_per_rank, 1, SpecError)
    for name, allowed in (("dtype", DTYPES), ("device", DEVICES)):
        if getattr(spec, name) not in allowed:
            raise SpecError(unknown_name(name, getattr(spec, name), allowed))
    for name in ("learning_rate", "clip_grad_norm"):
        value = getattr(spec, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
        if not is_number and not (name == "clip_grad_norm" and value is None):
            raise SpecError(f"{name}={value!r}: needs a positive number.")
    if not isinstance(spec.measure_memory, bool):
        raise SpecError(f"measure_memory={spec.measure_memory!r}: needs True or False.")
    if spec.measure_memory and spec.device == "emulated":
        raise SpecError(
            "measure_memory=True on emulated ranks, which hold nothing to measure. Use device='cpu', or simulate with "
            "memory=MemoryModel(model, dtype); units are in timeline.memory anyway."
        )
    _check_paths(spec)


def _check_paths(spec: "RunSpec") -> None:
    for name in ("text", "directory"):
        if not isinstance(getattr(spec, name), str | Path | None):
            raise SpecError(f"{name}={getattr(spec, name)!r}: needs a path.")
    if spec.text is not None:
        if not Path(spec.text).is_file():
            raise SpecError(f"text={str(spec.text)!r}: no such file. Give a text file's path, or None for Python's own.")
        if Path(spec.text).stat().st_size == 0:
            raise SpecError(f"text={str(spec.text)!r} is empty; training needs at least one byte.")
    if spec.directory is not None and Path(spec.directory).exists():
        if not Path(spec.directory).is_dir():
            raise SpecError(f"directory={str(spec.directory)!r} is a file. Choose a folder, new or empty.")
        if any(Path(spec.directory).iterdir()):
            raise SpecError(
                f"directory={str(spec.directory)!r} already holds a run, which would be overwritten. "
                "Choose a new one, or read the old one with tp.load_run."
            )


def check_slicings(spec: "RunSpec") -> None:
    """Slicings that fit the model."""
    if not spec.slicings:
        raise SpecError("slicing=[]: needs at least one slicing.")
    for slicing in spec.slicings:
        if slicing.seq_tokens > spec.model.max_seq_tokens:
            raise SlicingError(
                f"the slicing {slicing} has {slicing.seq_tokens} tokens a sequence; the model has "
                f"max_seq_tokens={spec.model.max_seq_tokens} positions. Shorten it, or give the model more positions."
            )


def check_schedule(spec: "RunSpec", schedule: Schedule) -> None:
    """A schedule that fits ranks, stages and slicing."""
    if not isinstance(schedule, Schedule):
        raise SpecError(f"schedule={schedule!r}: needs a family's name or a Schedule.")
    if schedule.n_ranks != spec.n_ranks:
        raise ScheduleError(
            f"the schedule has {schedule.n_ranks} ranks, the run n_ranks={spec.n_ranks}. Make them equal: "
            f"n_ranks={schedule.n_ranks}, or build the schedule for {spec.n_ranks}."
        )
    if spec.chunks_per_rank not in (None, schedule.chunks_per_rank):
        raise ScheduleError(
            f"chunks_per_rank={spec.chunks_per_rank}: the schedule has up to {schedule.chunks_per_rank} stages on a rank "
            f"({schedule.n_stages} stages on {schedule.n_ranks} ranks). Make it match the schedule, or leave it out."
        )
    if spec.slicings != (schedule.slicing,):
        raise ScheduleError(
            f"the schedule was made for {schedule.slicing}, the run is cut as {', '.join(map(str, spec.slicings))}. "
            "Pass slicing=schedule.slicing; a schedule runs one slicing."
        )


def check_memory(spec: "RunSpec") -> None:
    """Memory is measured of runs that train."""
    if spec.measure_memory and not spec.trains:
        raise SpecError("measure_memory=True with a schedule of forwards alone, which keeps no activations. Leave it out.")


def check_link(spec: "RunSpec") -> None:
    """Links are links, between ranks that there are, and between all that send each other messages."""
    check_links(spec.link, SpecError)
    if spec.link is None:
        return
    pairs_given = [] if isinstance(spec.link, Link) else list(spec.link)
    unknown = [pair for pair in pairs_given if not all(0 <= rank < spec.n_ranks for rank in pair)]
    if unknown:
        raise SpecError(
            f"link={spec.link!r}: {unknown[0]} names a rank that is not there; the run has the ranks 0…{spec.n_ranks - 1}. "
            "Leave that pair out, or raise n_ranks."
        )
    for schedule in spec.schedules:
        graph = schedule.graph
        pairs = np.unique(np.column_stack([graph.rank, graph.receiver])[graph.crosses], axis=0)
        for source, target in pairs.tolist():
            find_link(spec.link, source, target)


def check_cost(spec: "RunSpec") -> None:
    """Costs for an emulated run, one for each stage, and only for that."""
    if (spec.cost is not None) != (spec.device == "emulated"):
        need = "needs cost=…, the time its actions sleep" if spec.cost is None else "takes no cost; only 'emulated' does"
        raise SpecError(f"device={spec.device!r} {need}.")
    if spec.cost is None:
        return
    given = [spec.cost] if not isinstance(spec.cost, Sequence) else spec.cost
    if not all(isinstance(each, CostModel) for each in given):
        raise SpecError(f"cost={spec.cost!r}: needs a CostModel, or one for each stage.")
    if len(spec.stage_costs) != spec.n_stages:
        raise SpecError(f"{len(spec.stage_costs)} costs for {spec.n_stages} stages; give one for all, or one for each.")
    table = visited_costs(spec.slicings, spec.stage_costs)
    if np.isinf(table["forward_ms"] + table["backward_ms"]).any():
        row = table[np.isinf(table["forward_ms"] + table["backward_ms"])].iloc[0]
        raise SpecError(f"an emulated slice would sleep forever: {row.to_dict()}. Choose another slicing.")
