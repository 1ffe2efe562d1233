"""The slicing whose simulated step is shortest under a schedule family, beside a bound it cannot go below."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from terapipe.cost import CostModel, MemoryModel
from terapipe.errors import SlicingError
from terapipe.schedule import Schedule, build_schedule
from terapipe.search.bound import Bound, bound_step
from terapipe.search.climb import OVER_CAP, Climber
from terapipe.search.replay import Indices
from terapipe.search.starts import (
    equal_time_start,
    least_memory_start,
    prefix_ms,
    program_starts,
    slice_counts,
    uniform_start,
)
from terapipe.search.task import Task
from terapipe.simulator import simulate
from terapipe.slicing import Slicing
from terapipe.slicing.tables import Grid

N_CLIMBS = 4  # starts that are improved, with different numbers of slices
N_WORSE = 5  # numbers of slices tried in a row without a shorter step: the last has 2–3 times as many as the best
Found = list[tuple[str, Indices, float]]  # method, lengths, score


@dataclass(frozen=True, eq=False)
class SlicingSearch:
    """What `search_slicing` found.

    Attributes
    ----------
    slicing : Slicing
        The best found: all microbatches cut alike.
    makespan_ms : float
        Its step time in `tp.simulate`, messages free.
    lower_bound_ms : float
        No slicing of the grid goes below it, in any order of F and B; NaN where none is known.
    bound_holds_for : str
        The costs for which the bound is proven; "any cost" unless the grid is very fine.
    peak_bytes : float
        Most bytes on any rank; NaN without a memory model.
    schedule : Schedule
        The family's schedule of the slicing.
    n_evaluated : int
        Slicings timed.
    candidates : DataFrame
        Those it started from, and what they became: method, slicing, n_slices, makespan_ms,
        peak_bytes, fits (within the cap); the best first.
    """

    slicing: Slicing
    makespan_ms: float
    lower_bound_ms: float
    bound_holds_for: str
    peak_bytes: float
    schedule: Schedule
    n_evaluated: int
    candidates: pd.DataFrame

    @property
    def gap(self) -> float:
        """makespan_ms ÷ lower_bound_ms − 1: no slicing is better by more."""
        return self.makespan_ms / self.lower_bound_ms - 1 if self.lower_bound_ms else np.nan


def search_slicing(
    cost: CostModel,
    seq_tokens: int,
    n_ranks: int,
    n_microbatches: int = 1,
    schedule: str = "seq1f1b",
    memory: MemoryModel | None = None,
    memory_cap_bytes: float | None = None,
    *,
    n_slices: int | None = None,
    granularity_tokens: int = 1,
    min_slice_tokens: int = 1,
    max_slices: int | None = None,
) -> SlicingSearch:
    """Search the slicing with the shortest simulated step of a schedule family.

    Microbatches hold one sequence each and are cut alike. The search starts from equal slices,
    slices of equal time and the slicing DP's answers, and moves boundaries, splits and merges slices
    as long as the step gets shorter. It is a local search: `gap` tells how far it can be from the
    best. Deterministic.

    Parameters
    ----------
    cost : CostModel
        Of one stage, the stages being alike.
    seq_tokens, n_ranks, n_microbatches : int
        Tokens of a sequence, pipeline ranks, microbatches in a step.
    schedule : str
        A family of forwards and full backwards with one stage a rank; families of whole
        microbatches leave only the whole slice.
    memory, memory_cap_bytes : MemoryModel and float, optional
        With a cap no rank's peak (`memory.peak_bytes`) is above it.
    n_slices : int, optional
        Exactly so many slices a microbatch; default: any number up to `max_slices` (default 64).
    granularity_tokens, min_slice_tokens : int
        Slice lengths are multiples of the one and at least the other. Up to 2,048 multiples in a
        sequence the lower bound holds for any cost (see `bound_holds_for`).

    Raises
    ------
    SlicingError
        For sizes that do not fit, where every slicing is forbidden, or needs more than the cap.
    ScheduleError
        For an unknown family, or one that runs no such slicings.
    CostError
        For a cap without a memory model, or a question the cost model cannot answer.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost = tp.CallableCost(
    ...     lambda l, c, b: 40 + l + l * (c + l / 2) / 512, lambda l, c, b: 80 + 2 * l + l * (c + l / 2) / 256
    ... )
    >>> found = tp.search_slicing(cost, 1024, n_ranks=8, n_microbatches=8, granularity_tokens=16)
    >>> str(found.slicing)
    '[(1, [320, 224, 176, 160, 144])] * 8'
    """
    grid = Grid(seq_tokens, granularity_tokens, min_slice_tokens)
    task = Task(cost, grid, n_ranks, n_microbatches, schedule, n_slices, max_slices, memory, memory_cap_bytes)
    climber = Climber(task)
    starts = _starts(climber)
    only_whole = all(len(lengths) == 1 for _, lengths, _ in starts)
    bound = bound_step(replace(task, n_slices=1, max_slices=None) if only_whole else task)
    if bound.lengths is not None and climber.accepts(len(bound.lengths)):
        starts.append(_scored(climber, f"slicing DP, {n_ranks} stages", bound.lengths))
    found = _climb_best(climber, starts)
    best = min(found, key=lambda each: each[2])
    _refuse_impossible(task, climber, best)
    return _result(climber, bound, found, best)


def _starts(climber: Climber) -> Found:
    """Starting slicings with their scores; no more slices once steps only get longer with their number."""
    task, n_worse = climber.task, 0
    starts: Found = []
    prefixes = prefix_ms(task)
    for count in filter(climber.accepts, slice_counts(task)):
        named = [("equal", uniform_start(task, count)), ("equal time", equal_time_start(task, count, prefixes))]
        if task.memory is not None and task.memory_cap_bytes is not None:
            named.append(("least memory", least_memory_start(task, climber.replay(count), task.memory)))
        scored = [_scored(climber, name, lengths) for name, lengths in (named if count > 1 else [("whole", named[0][1])])]
        best = min((score for _, _, score in starts), default=np.inf)
        n_worse = 0 if min(score for _, _, score in scored) < best else n_worse + 1
        starts += scored
        if n_worse == N_WORSE:
            break
    if not starts:
        climber.replay(slice_counts(task)[0])  # the family refuses it, and says why
    if any(len(lengths) > 1 for _, lengths, _ in starts):
        starts += [_scored(climber, *named) for named in program_starts(task) if climber.accepts(len(named[1]))]
    return starts


def _scored(climber: Climber, name: str, lengths: Indices) -> tuple[str, Indices, float]:
    return name, lengths, float(climber.scores(lengths[np.newaxis])[0])


def _climb_best(climber: Climber, starts: Found) -> Found:
    """The starts, and what the best of each number of slices became."""
    climbed: Found = []
    tried: set[int] = set()
    for name, lengths, _ in sorted(starts, key=lambda each: each[2]):
        if len(lengths) not in tried and len(tried) < N_CLIMBS:
            tried.add(len(lengths))
            climbed.append((f"{name}, moved", *climber.climb(lengths)))
    return starts + climbed


def _refuse_impossible(task: Task, climber: Climber, best: tuple[str, Indices, float]) -> None:
    _, lengths, score = best
    if np.isinf(score):
        raise SlicingError("every slicing tried has a slice of infinite cost. Allow other lengths (granularity, n_slices).")
    if score >= OVER_CAP and task.memory is not None:
        least = climber.replay(len(lengths)).peak_bytes(task.memory, lengths[np.newaxis])[0]
        raise SlicingError(
            f"memory_cap_bytes={task.memory_cap_bytes:g}: {task.family} needs at least {least:.0f} bytes on a rank, with "
            f"{task.slicing(lengths)}; weights alone are {task.memory.weight_bytes}. Raise the cap, or allow other slices."
        )


def _result(climber: Climber, bound: Bound, found: Found, best: tuple[str, Indices, float]) -> SlicingSearch:
    task = climber.task
    slicing = task.slicing(best[1])
    schedule = build_schedule(task.family, task.n_ranks, slicing)
    return SlicingSearch(
        slicing=slicing,
        makespan_ms=simulate(schedule, task.cost).makespan_ms,
        lower_bound_ms=bound.lower_bound_ms,
        bound_holds_for=bound.holds_for,
        peak_bytes=np.nan if task.memory is None else float(task.memory.peak_bytes(schedule).max()),
        schedule=schedule,
        n_evaluated=climber.n_evaluated,
        candidates=_candidates(climber, found),
    )


def _candidates(climber: Climber, found: Found) -> pd.DataFrame:
    task, rows = climber.task, []
    for method, lengths, score in sorted(found, key=lambda each: each[2]):
        replay = climber.replay(len(lengths))
        makespan = replay.makespans_ms(*task.times_ms(lengths[np.newaxis]))[0]
        peak = np.nan if task.memory is None else replay.peak_bytes(task.memory, lengths[np.newaxis])[0]
        rows.append((method, str(task.slicing(lengths)), len(lengths), makespan, peak, score < OVER_CAP))
    names = ["method", "slicing", "n_slices", "makespan_ms", "peak_bytes", "fits"]
    return pd.DataFrame(rows, columns=names).drop_duplicates("slicing", ignore_index=True)
