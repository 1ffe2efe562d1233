"""One cell of a sweep: what decides its result, as a hash, and the result. Knows nothing of grids or files."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from terapipe.cost import CostModel, Links, check_links, describe_links
from terapipe.errors import CostError, ScheduleError, SpecError, as_number, check_integer
from terapipe.experiment.rows import Row
from terapipe.schedule import Schedule, build_schedule
from terapipe.simulator import simulate
from terapipe.slicing import Slicing, uniform_slicing
from terapipe.spec import RunSpec
from terapipe.timeline import Timeline

Description = dict[str, Any]


def hash_of(description: Description) -> str:
    """16 hex digits that stand for plain values."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SimulationCell:
    """A simulation, by the keys of a sweep, which has looked at the costs; see `sweep`."""

    cost: CostModel | Sequence[CostModel]
    n_ranks: int | None = None
    schedule: str | Schedule = "terapipe"
    slicing: Slicing | str | None = None
    seq_tokens: int | None = None
    n_slices: int = 1
    n_microbatches: int = 1
    n_sequences: int = 1
    chunks_per_rank: int | None = None
    link: Links | None = None
    bytes_per_token: float = 0
    contention: float = 1.0

    def __post_init__(self) -> None:
        for name in ("n_ranks", "seq_tokens", "n_slices", "n_microbatches", "n_sequences", "chunks_per_rank"):
            if getattr(self, name) is not None or name not in ("n_ranks", "seq_tokens", "chunks_per_rank"):
                object.__setattr__(self, name, check_integer(name, getattr(self, name), 1, SpecError))
        for name in ("bytes_per_token", "contention"):
            if math.isnan(as_number(getattr(self, name))):
                raise SpecError(f"{name}={getattr(self, name)!r}: needs a number.")
        if not isinstance(self.schedule, str | Schedule):
            raise SpecError(f"schedule={self.schedule!r}: needs a family's name or a Schedule.")
        if not isinstance(self.slicing, Slicing | str | None):
            raise SpecError(f"slicing={self.slicing!r}: needs a Slicing, or its notation like '[(1, [1024, 1024])]'.")
        check_links(self.link, SpecError)

    @cached_property
    def cut(self) -> Slicing:
        """The slicing given, or equal slices, or the schedule's own."""
        if self.slicing is not None:
            return Slicing.parse(self.slicing) if isinstance(self.slicing, str) else self.slicing
        if self.seq_tokens is None and isinstance(self.schedule, Schedule):
            return self.schedule.slicing
        return uniform_slicing(self.seq_tokens, self.n_slices, self.n_microbatches, self.n_sequences)  # type: ignore[arg-type]

    def build(self) -> Schedule:
        """The schedule; one that was given must fit the other settings."""
        if not isinstance(self.schedule, Schedule):
            n_ranks = check_integer("n_ranks", self.n_ranks, 1, ScheduleError)
            return build_schedule(self.schedule, n_ranks, self.cut, self.chunks_per_rank)
        if self.schedule.slicing != self.cut or self.n_ranks not in (None, self.schedule.n_ranks):
            raise ScheduleError(
                f"the schedule {self.schedule.name!r} was made for {self.schedule.n_ranks} ranks and {self.schedule.slicing}, "
                f"the cell has n_ranks={self.n_ranks} and {self.cut}. Leave those out, or build the schedule for them."
            )
        if self.chunks_per_rank not in (None, self.schedule.chunks_per_rank):
            raise ScheduleError(
                f"chunks_per_rank={self.chunks_per_rank}: the schedule {self.schedule.name!r} was built with "
                f"chunks_per_rank={self.schedule.chunks_per_rank}. Leave it out, or build the schedule for it."
            )
        return self.schedule

    def describe(self) -> Description:
        """All that decides the result, as plain values."""
        orders = None if isinstance(self.schedule, str) else [" ".join(map(str, order)) for order in self.schedule.orders]
        return {
            "how": "simulate",
            "schedule": self.schedule if orders is None else orders,
            "slicing": str(self.cut),
            "n_ranks": self.n_ranks,
            "chunks_per_rank": self.chunks_per_rank,
            "cost": [self._times(cost) for cost in ([self.cost] if isinstance(self.cost, CostModel) else self.cost)],
            "link": describe_links(self.link),
            "bytes_per_token": self.bytes_per_token,
            "contention": self.contention,
        }

    def _times(self, cost: CostModel) -> list[list[float]]:
        """What a cost model says of the slices that the cell visits, and whether it was measured: the source shows that."""
        points = np.unique(self.cut.units[:, 2:], axis=0).T
        forward, backward, weight = (function(*points) for function in (cost.forward_ms, cost.backward_ms, cost.weight_ms))
        try:
            inputs = cost.input_ms(*points)
        except CostError:  # halves that cannot be: only a schedule that runs them apart is refused
            inputs = backward - weight
        answers = (forward, backward, inputs, weight, cost.is_extrapolated(*points))
        return [np.broadcast_to(answer, points.shape[1]).tolist() for answer in answers]

    def measure(self, spec_hash: str, root: Path) -> Row:
        """Simulate."""
        link, bytes_per_token, contention = self.link, self.bytes_per_token, self.contention
        return {"spec_hash": spec_hash, **_numbers(simulate(self.build(), self.cost, link, bytes_per_token, contention))}


class RunCell:
    """A run, by the fields of its spec."""

    def __init__(self, **values: Any) -> None:
        self.spec = RunSpec(**values)

    def describe(self) -> Description:
        """The spec, and the bytes of its text; not the code of a stage of your own."""
        text = None if self.spec.text is None else hashlib.sha256(Path(self.spec.text).read_bytes()).hexdigest()
        return {"how": "run", **json.loads(self.spec.to_json()), "text": text}

    def measure(self, spec_hash: str, root: Path) -> Row:
        """Run, in a new folder under `root`."""
        from terapipe.engine.launch import run
        from terapipe.engine.results import new_directory

        done = run(self.spec.replaced(directory=new_directory(spec_hash, root)))
        return {"spec_hash": spec_hash, **_numbers(done.timeline), "directory": str(done.directory)}


def _numbers(timeline: Timeline) -> Row:
    return {
        "makespan_ms": timeline.makespan_ms,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_overhead": timeline.bubble_overhead,
        "tokens_per_second": timeline.tokens_per_second,
        "peak_in_flight": int(timeline.peak_in_flight().max()),
        "source": timeline.source,
        "refused": "",
    }
