"""terapipe: token-level pipeline parallelism, planned, simulated, run for real and looked at."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terapipe import plots as plots
    from terapipe.config import ModelConfig as ModelConfig
    from terapipe.cost import CallableCost as CallableCost
    from terapipe.cost import CostModel as CostModel
    from terapipe.cost import Device as Device
    from terapipe.cost import LinearContextCost as LinearContextCost
    from terapipe.cost import Link as Link
    from terapipe.cost import MemoryModel as MemoryModel
    from terapipe.cost import Profile as Profile
    from terapipe.cost import RooflineCost as RooflineCost
    from terapipe.cost import StageShare as StageShare
    from terapipe.cost import TableCost as TableCost
    from terapipe.cost import TransferCost as TransferCost
    from terapipe.engine.launch import run as run
    from terapipe.engine.results import Run as Run
    from terapipe.engine.results import load_run as load_run
    from terapipe.engine.results import runs as runs
    from terapipe.engine.verify import verify as verify
    from terapipe.errors import TerapipeError as TerapipeError
    from terapipe.experiment import race as race
    from terapipe.experiment import sweep as sweep
    from terapipe.profiling import profile as profile
    from terapipe.schedule import Action as Action
    from terapipe.schedule import Schedule as Schedule
    from terapipe.schedule import build_schedule as build_schedule
    from terapipe.schedule import schedules as schedules
    from terapipe.search import best_schedule as best_schedule
    from terapipe.search import compare_slicings as compare_slicings
    from terapipe.search import search_slicing as search_slicing
    from terapipe.simulator import replay as replay
    from terapipe.simulator import simulate as simulate
    from terapipe.slicing import Slicing as Slicing
    from terapipe.slicing import equal_flops_slicing as equal_flops_slicing
    from terapipe.slicing import optimal_slicing as optimal_slicing
    from terapipe.slicing import pipeline_latency_ms as pipeline_latency_ms
    from terapipe.slicing import t_max_curve as t_max_curve
    from terapipe.slicing import uniform_slicing as uniform_slicing
    from terapipe.spec import RunSpec as RunSpec
    from terapipe.timeline import Timeline as Timeline

__version__ = "0.1.0"

# Names load on first use, so that planning needs no torch and `import terapipe` stays fast.
_HOMES = {
    "config": ["ModelConfig"],
    "cost": [
        "CallableCost",
        "CostModel",
        "Device",
        "LinearContextCost",
        "Link",
        "MemoryModel",
        "Profile",
        "RooflineCost",
        "StageShare",
        "TableCost",
        "TransferCost",
    ],
    "engine.launch": ["run"],
    "engine.results": ["Run", "load_run", "runs"],
    "engine.verify": ["verify"],
    "errors": ["TerapipeError"],
    "experiment": ["race", "sweep"],
    "profiling": ["profile"],
    "schedule": ["Action", "Schedule", "build_schedule", "schedules"],
    "search": ["best_schedule", "compare_slicings", "search_slicing"],
    "simulator": ["replay", "simulate"],
    "slicing": ["Slicing", "equal_flops_slicing", "optimal_slicing", "pipeline_latency_ms", "t_max_curve", "uniform_slicing"],
    "spec": ["RunSpec"],
    "timeline": ["Timeline"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ["plots"]

__all__ = [*sorted(_HOME_OF), *_MODULES]  # noqa: PLE0604 - the names above


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(f"terapipe.{_HOME_OF[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"terapipe.{name}")
    else:
        raise AttributeError(f"module 'terapipe' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
