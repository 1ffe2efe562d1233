"""Runs so small that starting their processes is most of the time."""

from pathlib import Path
from typing import Any

import terapipe as tp

MODEL = tp.ModelConfig(n_layers=4, d_model=8, n_heads=2, max_seq_tokens=64)
SLICED = "[(1, [4, 3, 5])]"


def spec(directory: Path | None = None, **values: Any) -> tp.RunSpec:
    """A run of `MODEL` on two ranks; `values` replace what is said here."""
    return tp.RunSpec(**{"model": MODEL, "slicing": SLICED, "n_steps": 2, "directory": directory} | values)


def sleeps(forward_ms: float, backward_ms: float) -> tp.CallableCost:
    """The cost of an emulated slice, whatever its length."""
    return tp.CallableCost(lambda l, c, b: forward_ms, lambda l, c, b: backward_ms)


def endless(directory: Path, **values: Any) -> tp.RunSpec:
    """A run that is still going when it is stopped: emulated, 20 ms an action."""
    return spec(directory, **{"n_steps": 100_000, "device": "emulated", "cost": sleeps(20, 20)} | values)


def orders_of(rows: Any) -> list[list[str]]:
    """What each rank ran, in order, from the rows of one step."""
    rows = rows.sort_values(["rank", "start_ms"], kind="stable")
    texts = rows["stage"].astype(str) + rows["kind"] + rows["microbatch"].astype(str) + "." + rows["slice"].astype(str)
    return [list(found) for _, found in texts.groupby(rows["rank"])]


def planned(schedule: tp.Schedule) -> list[list[str]]:
    """What each rank should run."""
    return [[str(action) for action in order] for order in schedule.orders]
