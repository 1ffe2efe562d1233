"""A run directory: what a run leaves on disk, and how it is read back.

spec.json                the spec          schedule.csv, schedule-1.csv, …   one for each slicing
timings-rank-N.csv       written after every step, so a failed run keeps its earlier steps
timings.parquet          all ranks merged  losses.csv    step, loss, grad_norm
memory-rank-N.csv        where memory was measured: what a rank held after each action
rank-N.log               what a rank printed              host.json   machine, versions, steal
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from terapipe.errors import SpecError
from terapipe.schedule import Schedule
from terapipe.spec import RunSpec
from terapipe.timeline import (
    COLUMNS,
    EMULATED,
    EMULATED_EXTRAPOLATED,
    LINK_GIVEN,
    MEASURED,
    MEMORY_COLUMNS,
    Timeline,
    input_ends,
    name_blockers,
)

RANK_COLUMNS = [name for name in COLUMNS if name not in ("source", "blocked_by")]
LOSS_COLUMNS = ["step", "loss", "grad_norm"]
DEFAULT_ROOT = Path("runs")


@dataclass(frozen=True, eq=False)
class Run:
    """A run, finished or not: what its directory holds.

    Attributes
    ----------
    spec : RunSpec
        As it was run.
    directory : Path
        Where everything lies.
    """

    spec: RunSpec
    directory: Path

    @cached_property
    def timeline(self) -> Timeline:
        """Every action of every step that all ranks finished, and what they held, where the run measured it."""
        timings = read_timings(self.directory, self.spec)
        memory = read_memory(self.directory, timings["step"]) if self.spec.measure_memory else None
        return Timeline(timings, memory)

    @cached_property
    def losses(self) -> pd.DataFrame:
        """One row a measured step: step, loss, grad_norm, tokens_per_second (optimizer left out)."""
        losses = pd.read_csv(self.directory / "losses.csv")
        steps = self.timeline.steps
        speed = (steps["n_tokens"] / steps["makespan_ms"] * 1e3).rename("tokens_per_second")
        return losses[losses["step"] >= 0].merge(speed, left_on="step", right_index=True).reset_index(drop=True)

    @cached_property
    def host(self) -> dict[str, Any]:
        """Machine, versions, threads, affinity, steal time."""
        path = self.directory / "host.json"
        return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}

    def summary(self) -> pd.Series:
        """The run in a few numbers."""
        timeline, losses = self.timeline, self.losses
        values = {
            "schedule": self.spec.schedule_name,
            "slicing": ", ".join(map(str, self.spec.slicings)),
            "source": timeline.source,
            "link": "" if self.spec.link is None else str(self.spec.link),
            "n_ranks": self.spec.n_ranks,
            "n_steps": len(timeline.steps),
            "step_ms": timeline.makespan_ms,
            "tokens_per_second": timeline.tokens_per_second,
            "bubble_fraction": timeline.bubble_fraction,
            "loss_first": losses["loss"].iloc[0] if len(losses) else np.nan,
            "loss_last": losses["loss"].iloc[-1] if len(losses) else np.nan,
        }
        return pd.Series(values, name=str(self.directory))


def prepare(spec: RunSpec, directory: Path) -> Path:
    """Write what the ranks read: the spec and its schedules."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "spec.json").write_text(spec.to_json() + "\n", encoding="utf-8")
    for index, schedule in enumerate(spec.schedules):
        schedule.to_csv(directory / _schedule_file(index))
    return directory


def read_schedules(directory: Path, spec: RunSpec) -> list[Schedule]:
    """The schedules that `prepare` wrote, one for each slicing."""
    return [
        Schedule.from_csv(directory / _schedule_file(index), slicing, spec.schedule_name)
        for index, slicing in enumerate(spec.slicings)
    ]


def _schedule_file(index: int) -> str:
    return "schedule.csv" if index == 0 else f"schedule-{index}.csv"


def new_directory(label: str, root: Path = DEFAULT_ROOT) -> Path:
    """A directory that did not exist, named by the time and a label."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(10_000):
        directory = root / (f"{stamp}-{label}" + (f"-{attempt}" if attempt else ""))
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return directory.absolute()
    raise SpecError(f"no free name for a run under {root}; clean it up.")


def load_run(directory: str | Path) -> Run:
    """Read a run directory, also of a run that failed: its complete steps are all there.

    Raises
    ------
    SpecError
        Where there is no run.
    """
    directory = Path(directory)
    spec_file = directory / "spec.json"
    if not spec_file.exists():
        raise SpecError(f"{str(directory)!r} holds no run (no spec.json). tp.runs() lists those under runs/.")
    return Run(RunSpec.from_json(spec_file.read_text("utf-8")), directory)


def runs(root: str | Path = DEFAULT_ROOT) -> pd.DataFrame:
    """All runs under a folder, one row each, newest last; empty where there are none."""
    found = sorted(Path(root).glob("**/spec.json"), key=lambda path: path.stat().st_mtime)
    rows = []
    for path in found:
        with suppress(SpecError):  # a run that failed before its first step has nothing to tell
            rows.append(load_run(path.parent).summary())
    return pd.DataFrame(rows)


def read_timings(directory: Path, spec: RunSpec) -> pd.DataFrame:
    """The merged table: the parquet file of a finished run, else made from the ranks' files."""
    merged = directory / "timings.parquet"
    if merged.exists():
        return pd.read_parquet(merged)
    files = sorted(directory.glob("timings-rank-*.csv"))
    if not files:
        raise SpecError(f"{str(directory)!r} holds no timings: the run ended before its first step.")
    frame = pd.concat([pd.read_csv(file) for file in files], ignore_index=True)
    frame = frame.assign(source=_source(spec), blocked_by="")
    frame = _complete_steps(frame, spec).sort_values(["step", "rank", "start_ms"], kind="stable").reset_index(drop=True)
    if frame.empty:
        raise SpecError(f"{str(directory)!r} holds no whole step: the run ended before all ranks had finished one.")
    for _, rows in frame.groupby("step"):
        frame.loc[rows.index, "blocked_by"] = list(name_blockers(rows))
        frame.loc[rows.index, "ready_ms"] = rows["ready_ms"].fillna(input_ends(rows)).fillna(0.0)
    return frame[COLUMNS]


def read_memory(directory: Path, steps: pd.Series) -> pd.DataFrame:
    """What each rank held once each action had ended (`Timeline.memory`), of the steps named."""
    files = sorted(directory.glob("memory-rank-*.csv"))
    if not files:
        raise SpecError(f"{str(directory)!r} holds no memory-rank-N.csv, though its run measured memory. Run it again.")
    frame = pd.concat([pd.read_csv(file) for file in files], ignore_index=True)
    frame = frame[frame["step"].isin(steps)].sort_values(["step", "rank"], kind="stable")
    return frame[MEMORY_COLUMNS].reset_index(drop=True)


def _source(spec: RunSpec) -> str:
    extrapolates = spec.device == "emulated" and spec.is_extrapolated
    source = MEASURED if spec.device != "emulated" else EMULATED_EXTRAPOLATED if extrapolates else EMULATED
    return source if spec.link is None else source + LINK_GIVEN


def _complete_steps(frame: pd.DataFrame, spec: RunSpec) -> pd.DataFrame:
    """The rows of steps that every rank finished."""
    n_actions = [sum(len(order) for order in schedule.orders) for schedule in spec.schedules]
    counts = frame.groupby("step").size()
    expected = [n_actions[spec.slicing_index(step)] for step in counts.index]
    return frame[frame["step"].isin(counts.index[counts.to_numpy() == expected])]
