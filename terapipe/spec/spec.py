"""A run, described: everything the ranks need, checked before any process starts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from terapipe.config import ModelConfig, split_layers
from terapipe.cost import CostModel, Links
from terapipe.errors import SpecError, check_keys
from terapipe.schedule import Kind, Schedule, build_schedule
from terapipe.slicing import Slicing
from terapipe.spec.checks import check_cost, check_link, check_memory, check_schedule, check_slicings, check_values
from terapipe.spec.costs import visited_costs
from terapipe.spec.imports import stage_path
from terapipe.spec.record import read_spec, write_spec


@dataclass(frozen=True)
class RunSpec:
    """Everything a run needs.

    Parameters
    ----------
    model : ModelConfig
        The model to train.
    slicing : Slicing, str, or a list of them
        A list is cycled over the steps, whose lengths may then differ.
    schedule : str or Schedule
        A family's name, or a schedule built or typed for exactly this slicing. One of forwards alone
        evaluates: it makes losses, drops nothing (`model.dropout`), and updates nothing.
    n_ranks : int
        Processes.
    chunks_per_rank : int, optional
        Stages on each rank; default: those of the schedule or of its family.
    layers_per_stage : list of int, optional
        Layers on each stage; by default they differ by at most one.
    n_steps, n_warmup_steps : int
        Measured steps, after that many more whose step is below 0.
    dtype : "float32" or "float64"
    seed : int
        Of weights, dropout masks and nothing else.
    learning_rate, clip_grad_norm : float
        Of AdamW; the norm is that of all ranks.
    text : path, optional
        Bytes to train on, repeated as needed; default: English text that Python ships.
    device : "cpu", "cuda" or "emulated"
        "emulated": real processes and messages, but an action sleeps for what `cost` says.
    cost : CostModel or list of CostModel, optional
        Needed by "emulated": of every stage, or one a stage.
    link : Link or {(source rank, target rank): Link}, optional
        A slower network to try on one machine: a message counts as arrived no earlier than over such
        a link. What the machine's own transport takes comes on top where it is longer. The run's source says
        "link given".
    directory : path, optional
        New run directory; default: a new one under `runs/`.
    stage : str or class, optional
        "package.module:Class" of a stage of your own (see `engine.stage`); default: the built-in model.
    measure_memory : bool
        Have each rank count the bytes that it holds after every action, for `run.timeline.memory`.
        Counting takes time: compare no times of such a run.

    Raises
    ------
    SpecError, ConfigError, SlicingError, ScheduleError
        With the value, what is allowed and what to do.
    """

    model: ModelConfig
    slicing: Slicing | str | Sequence[Slicing | str]
    schedule: str | Schedule = "terapipe"
    n_ranks: int = 2
    chunks_per_rank: int | None = None
    layers_per_stage: Sequence[int] | None = None
    n_steps: int = 5
    n_warmup_steps: int = 1
    dtype: Literal["float32", "float64"] = "float32"
    seed: int = 0
    learning_rate: float = 3e-4
    clip_grad_norm: float | None = None
    text: str | Path | None = None
    device: Literal["cpu", "cuda", "emulated"] = "cpu"
    cost: CostModel | Sequence[CostModel] | None = None
    link: Links | None = None
    directory: str | Path | None = None
    stage: str | type | None = None
    measure_memory: bool = False

    def __new__(cls, *args: Any, **values: Any) -> "RunSpec":  # noqa: D102 - only to name the nearest valid key
        check_keys("run", values, (field.name for field in fields(cls)), SpecError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_values(self)
        self._normalise()
        check_slicings(self)
        self.schedules  # noqa: B018 - building them checks
        self.layer_ranges  # noqa: B018 - making them checks
        if self.layers_per_stage is not None:
            object.__setattr__(self, "layers_per_stage", list(self.layers_per_stage))
        check_link(self)
        check_memory(self)
        check_cost(self)

    @property
    def n_stages(self) -> int:
        """Number of stages, those of the schedule."""
        return self.schedules[0].n_stages

    @property
    def layer_ranges(self) -> list[range]:
        """Layers of each stage."""
        return split_layers(self.model.n_layers, self.n_stages, self.layers_per_stage)

    @property
    def slicings(self) -> tuple[Slicing, ...]:
        """The slicings, cycled over the steps."""
        given = (self.slicing,) if isinstance(self.slicing, Slicing) else self.slicing
        return given  # type: ignore[return-value]  # normalised: no text is left

    @property
    def schedule_name(self) -> str:
        """The schedule's family, or the name of one that was built or typed."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    def slicing_index(self, step: int) -> int:
        """Which of `slicings` and `schedules` a step runs; warm-up steps, below 0, begin the cycle."""
        return (step + self.n_warmup_steps) % len(self.slicings)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """The valid schedule of each slicing."""
        if isinstance(self.schedule, str):
            built = tuple(build_schedule(self.schedule, self.n_ranks, each, self.chunks_per_rank) for each in self.slicings)
        else:
            check_schedule(self, self.schedule)
            built = (self.schedule,)
        return tuple(schedule.validate() for schedule in built)

    def _normalise(self) -> None:
        """Text to slicings, classes to import paths; the fields keep one type from here on."""
        if isinstance(self.slicing, list | tuple):
            object.__setattr__(self, "slicing", tuple(_read_slicing(each) for each in self.slicing))
        else:
            object.__setattr__(self, "slicing", _read_slicing(self.slicing))
        if self.stage is not None:
            object.__setattr__(self, "stage", stage_path(self.stage))

    @property
    def trains(self) -> bool:
        """Whether anything goes backward; a run of forwards alone evaluates: its losses are all it makes."""
        return any(schedule.kinds != {Kind.F} for schedule in self.schedules)

    @property
    def stage_costs(self) -> list[CostModel]:
        """The cost model of each stage of an emulated run."""
        assert self.cost is not None
        return [self.cost] * self.n_stages if isinstance(self.cost, CostModel) else list(self.cost)

    @property
    def bytes_per_token(self) -> int:
        """Size of a message for each token of its slice: the features of one, in the run's dtype."""
        return self.model.d_model * (8 if self.dtype == "float64" else 4)

    @property
    def is_extrapolated(self) -> bool:
        """Whether an emulated slice sleeps for a cost beyond what was measured."""
        return self.cost is not None and bool(visited_costs(self.slicings, self.stage_costs)["extrapolated"].any())

    def to_json(self) -> str:
        """The spec as JSON; a schedule as its orders, costs as the points this run visits."""
        return write_spec(self)

    @classmethod
    def from_json(cls, text: str) -> "RunSpec":
        """Read what `to_json` wrote; unknown keys and other formats are refused.

        The directory is left out: it says where the run was, not where it goes next.
        """
        return read_spec(cls, text)

    def replaced(self, **values: Any) -> "RunSpec":
        """A copy with some fields changed, checked again."""
        return replace(self, **values)


def _read_slicing(given: object) -> Slicing:
    if isinstance(given, Slicing):
        return given
    if isinstance(given, str):
        return Slicing.parse(given)
    raise SpecError(f"slicing={given!r}: needs a Slicing, its notation like '[(1, [1024, 1024])]', or a list of them.")
