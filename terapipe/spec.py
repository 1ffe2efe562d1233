"""A run, described: everything the ranks need, checked before any process starts, as JSON both ways."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from terapipe.config import ModelConfig, split_layers
from terapipe.cost import CostModel, TableCost
from terapipe.cost.model import Numbers, Times
from terapipe.errors import ScheduleError, SlicingError, SpecError, check_integer, check_keys, unknown_name
from terapipe.schedule import Kind, Schedule, build_schedule
from terapipe.slicing import Slicing

FORMAT = 1
DTYPES = ("float32", "float64")
DEVICES = ("cpu", "cuda", "emulated")


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
        A family's name, or a schedule built or typed for exactly this slicing.
    n_ranks, chunks_per_rank : int
        Processes, and stages on each.
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
    directory : path, optional
        New run directory; default: a new one under `runs/`.
    stage : str or class, optional
        "package.module:Class" of a stage of your own (see `engine.stage`); default: the built-in model.

    Raises
    ------
    SpecError, ConfigError, SlicingError, ScheduleError
        With the value, what is allowed and what to do.
    """

    model: ModelConfig
    slicing: Slicing | str | Sequence[Slicing | str]
    schedule: str | Schedule = "terapipe"
    n_ranks: int = 2
    chunks_per_rank: int = 1
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
    directory: str | Path | None = None
    stage: str | type | None = None

    def __new__(cls, *args: Any, **values: Any) -> "RunSpec":  # noqa: D102 - only to name the nearest valid key
        check_keys("run", values, (field.name for field in fields(cls)), SpecError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_values()
        self._normalise()
        self._check_slicings()
        self.layer_ranges  # noqa: B018 - making them checks
        self.schedules  # noqa: B018 - building them checks
        self._check_cost()

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.n_ranks * self.chunks_per_rank

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
            built = (build_schedule(self.schedule, self.n_ranks, each, self.chunks_per_rank) for each in self.slicings)
            return tuple(schedule.validate() for schedule in built)
        self._check_schedule(self.schedule)
        return (self.schedule,)

    def _check_values(self) -> None:
        if not isinstance(self.model, ModelConfig):
            raise SpecError(f"model={self.model!r}: needs a ModelConfig, e.g. ModelConfig.preset('tour').")
        for name, least in (("n_ranks", 1), ("chunks_per_rank", 1), ("n_steps", 1), ("n_warmup_steps", 0), ("seed", 0)):
            check_integer(name, getattr(self, name), least, SpecError)
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in allowed:
                raise SpecError(unknown_name(name, getattr(self, name), allowed))
        for name in ("learning_rate", "clip_grad_norm"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
            if not is_number and not (name == "clip_grad_norm" and value is None):
                raise SpecError(f"{name}={value!r}: needs a positive number.")
        self._check_paths()

    def _check_paths(self) -> None:
        for name in ("text", "directory"):
            if not isinstance(getattr(self, name), str | Path | None):
                raise SpecError(f"{name}={getattr(self, name)!r}: needs a path.")
        if self.text is not None:
            if not Path(self.text).is_file():
                raise SpecError(f"text={str(self.text)!r}: no such file. Give a text file's path, or None for Python's own.")
            if Path(self.text).stat().st_size == 0:
                raise SpecError(f"text={str(self.text)!r} is empty; training needs at least one byte.")
        if self.directory is not None and Path(self.directory).exists():
            if not Path(self.directory).is_dir():
                raise SpecError(f"directory={str(self.directory)!r} is a file. Choose a folder, new or empty.")
            if any(Path(self.directory).iterdir()):
                raise SpecError(
                    f"directory={str(self.directory)!r} already holds a run, which would be overwritten. "
                    "Choose a new one, or read the old one with tp.load_run."
                )

    def _normalise(self) -> None:
        """Text to slicings, classes to import paths; the fields keep one type from here on."""
        if isinstance(self.slicing, list | tuple):
            object.__setattr__(self, "slicing", tuple(_read_slicing(each) for each in self.slicing))
        else:
            object.__setattr__(self, "slicing", _read_slicing(self.slicing))
        if self.layers_per_stage is not None:
            split_layers(self.model.n_layers, self.n_stages, self.layers_per_stage)
            object.__setattr__(self, "layers_per_stage", list(self.layers_per_stage))
        if self.stage is not None:
            object.__setattr__(self, "stage", stage_path(self.stage))

    def _check_slicings(self) -> None:
        if not self.slicings:
            raise SpecError("slicing=[]: needs at least one slicing.")
        for slicing in self.slicings:
            if slicing.seq_tokens > self.model.max_seq_tokens:
                raise SlicingError(
                    f"the slicing {slicing} has {slicing.seq_tokens} tokens a sequence; the model has "
                    f"max_seq_tokens={self.model.max_seq_tokens} positions. Shorten it, or give the model more positions."
                )

    def _check_schedule(self, schedule: Schedule) -> None:
        if not isinstance(schedule, Schedule):
            raise SpecError(f"schedule={schedule!r}: needs a family's name or a Schedule.")
        if schedule.n_ranks != self.n_ranks:
            raise ScheduleError(
                f"the schedule has {schedule.n_ranks} ranks, the run n_ranks={self.n_ranks}. Make them equal: "
                f"n_ranks={schedule.n_ranks}, or build the schedule for {self.n_ranks}."
            )
        if schedule.n_stages != self.n_stages:
            raise ScheduleError(
                f"the schedule has {schedule.n_stages} stages; n_ranks × chunks_per_rank = "
                f"{self.n_ranks} × {self.chunks_per_rank} = {self.n_stages}. Make chunks_per_rank match the schedule."
            )
        if self.slicings != (schedule.slicing,):
            raise ScheduleError(
                f"the schedule was made for {schedule.slicing}, the run is cut as {', '.join(map(str, self.slicings))}. "
                "Pass slicing=schedule.slicing; a schedule runs one slicing."
            )
        split = [action for order in schedule.orders for action in order if action.kind in (Kind.I, Kind.W)]
        if split and self.device != "emulated":
            raise ScheduleError(
                f"the schedule splits the backward ({split[0]}): such schedules are simulated and emulated; "
                "ranks that compute run F and B. Replace each I by B and leave W out, or use device='emulated'."
            )
        if not any(action.kind is not Kind.F for order in schedule.orders for action in order):
            raise ScheduleError("the schedule has no backward; a run trains. Add a B for every F.")
        schedule.validate()

    def _check_cost(self) -> None:
        if (self.cost is not None) != (self.device == "emulated"):
            need = "needs cost=…, the time its actions sleep" if self.cost is None else "takes no cost; only 'emulated' does"
            raise SpecError(f"device={self.device!r} {need}.")
        if self.cost is None:
            return
        given = [self.cost] if not isinstance(self.cost, Sequence) else self.cost
        if not all(isinstance(each, CostModel) for each in given):
            raise SpecError(f"cost={self.cost!r}: needs a CostModel, or one for each stage.")
        if len(self.stage_costs) != self.n_stages:
            raise SpecError(f"{len(self.stage_costs)} costs for {self.n_stages} stages; give one for all, or one for each.")
        table = self._cost_table()
        if np.isinf(table["forward_ms"] + table["backward_ms"]).any():
            row = table[np.isinf(table["forward_ms"] + table["backward_ms"])].iloc[0]
            raise SpecError(f"an emulated slice would sleep forever: {row.to_dict()}. Choose another slicing.")

    @property
    def stage_costs(self) -> list[CostModel]:
        """The cost model of each stage of an emulated run."""
        assert self.cost is not None
        return [self.cost] * self.n_stages if isinstance(self.cost, CostModel) else list(self.cost)

    @property
    def is_extrapolated(self) -> bool:
        """Whether an emulated slice sleeps for a cost beyond what was measured."""
        return self.cost is not None and bool(self._cost_table()["extrapolated"].any())

    def _cost_table(self) -> pd.DataFrame:
        """What each stage's cost model says of the slices of this run: all that an emulation needs."""
        units = np.unique(np.concatenate([slicing.units[:, 2:] for slicing in self.slicings]), axis=0)
        names = ("forward_ms", "backward_ms", "weight_ms")
        tables = []
        for stage, cost in enumerate(self.stage_costs):
            point = {"stage": stage, "slice_tokens": units[:, 0], "context_tokens": units[:, 1], "n_sequences": units[:, 2]}
            times = {name: getattr(cost, name)(*units.T) for name in names}
            tables.append(pd.DataFrame(point | times | {"extrapolated": cost.is_extrapolated(*units.T)}))
        return pd.concat(tables, ignore_index=True)

    def to_json(self) -> str:
        """The spec as JSON; a schedule as its orders, costs as the points this run visits."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["model"] = self.model.to_dict()
        values["slicing"] = [str(slicing) for slicing in self.slicings]
        if isinstance(self.schedule, Schedule):
            orders = [" ".join(map(str, order)) for order in self.schedule.orders]
            values["schedule"] = {"name": self.schedule.name, "orders": orders}
        values["cost"] = None if self.cost is None else self._cost_table().to_dict("list")
        for name in ("text", "directory"):
            values[name] = None if values[name] is None else str(values[name])
        return json.dumps({"format": FORMAT, **values}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "RunSpec":
        """Read what `to_json` wrote; unknown keys and other formats are refused.

        The directory is left out: it says where the run was, not where it goes next.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpecError(f"not a run spec: {error}.") from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise SpecError(f'not a run spec of "format": {FORMAT}: {text[:60]!r}…')
        check_keys("run", values, (field.name for field in fields(cls)), SpecError)
        missing = [key for key in ("model", "slicing") if key not in values]
        if missing:
            raise SpecError(f"a run spec needs {' and '.join(missing)}; given: {', '.join(values) or 'nothing'}.")
        try:
            return cls(**(_read_values(values) | {"directory": None}))
        except (KeyError, TypeError, AttributeError) as error:
            raise SpecError(f"not a run spec as RunSpec.to_json writes it: {error!r}.") from error

    def replaced(self, **values: Any) -> "RunSpec":
        """A copy with some fields changed, checked again."""
        return replace(self, **values)


class _VisitedCost(TableCost):
    """The points that a run visits, as `to_json` wrote them: they stay extrapolated if they were."""

    def __init__(self, frame: pd.DataFrame) -> None:
        super().__init__(frame)
        beyond = frame[frame["extrapolated"]] if "extrapolated" in frame else frame[:0]
        self._beyond = beyond[["slice_tokens", "context_tokens", "n_sequences"]].to_numpy()

    def is_extrapolated(self, slice_tokens: Numbers, context_tokens: Numbers, n_sequences: Numbers = 1) -> Times:
        found = np.asarray(super().is_extrapolated(slice_tokens, context_tokens, n_sequences))
        for length, context, sequences in self._beyond:
            found = found | ((slice_tokens == length) & (context_tokens == context) & (n_sequences == sequences))
        return found[()]


def _read_values(values: dict[str, Any]) -> dict[str, Any]:
    """What JSON cannot hold, made from what it holds."""
    read = values | {"model": ModelConfig.from_dict(values["model"])}
    if len(values["slicing"]) == 1:
        read["slicing"] = values["slicing"][0]
    if isinstance(values.get("schedule"), dict):
        orders = dict(enumerate(values["schedule"]["orders"]))
        read["schedule"] = Schedule.from_orders(orders, values["slicing"][0], values["schedule"]["name"])
    if values.get("cost") is not None:
        tables = pd.DataFrame(values["cost"]).groupby("stage")
        read["cost"] = [_VisitedCost(table.drop(columns="stage")) for _, table in tables]
    return read


def _read_slicing(given: object) -> Slicing:
    if isinstance(given, Slicing):
        return given
    if isinstance(given, str):
        return Slicing.parse(given)
    raise SpecError(f"slicing={given!r}: needs a Slicing, its notation like '[(1, [1024, 1024])]', or a list of them.")


def stage_path(stage: str | type) -> str:
    """The import path "package.module:Class" of a stage that every rank can import.

    Raises
    ------
    SpecError
        For a class defined in a notebook cell or script, which other processes cannot import.
    """
    if not isinstance(stage, str):
        module, name = getattr(stage, "__module__", None), getattr(stage, "__qualname__", repr(stage))
        if module in (None, "__main__", "builtins") or "<locals>" in name:
            raise SpecError(
                f"stage {name!r} is defined in a notebook cell or inside a function, where the ranks' processes cannot "
                "import it. Put it into a file beside the notebook, e.g. my_stage.py, and pass stage='my_stage:"
                f"{name.split('.')[-1]}'."
            )
        stage = f"{module}:{name}"
    module_name, colon, class_name = stage.partition(":")
    if not colon or not class_name:
        raise SpecError(f"stage={stage!r}: needs an import path 'package.module:Class'.")
    if module_name == "__main__":
        raise SpecError(f"stage={stage!r}: ranks cannot import __main__. Put the class into a file and name that module.")
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise SpecError(f"stage={stage!r}: no module {module_name!r} can be imported. Is its folder on sys.path?")
    return stage
