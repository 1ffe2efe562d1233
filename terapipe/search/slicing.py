"""The slicing whose simulated step is shortest under a schedule family, beside a bound it cannot go below."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from terapipe.cost import CostModel, MemoryModel
from terapipe.errors import ScheduleError, SlicingError
from terapipe.schedule import Schedule, build_schedule
from terapipe.search.bound import Bound, bound_step
from terapipe.search.candidates import (
    allowed_start,
    equal_time_start,
    least_memory_start,
    prefix_ms,
    program_starts,
    slice_counts,
    uniform_start,
)
from terapipe.search.climb import OVER_CAP, Climber
from terapipe.search.problem import MAX_SLICES, Problem
from terapipe.search.replay import Indices
from terapipe.simulator import simulate
from terapipe.slicing import Slicing
from terapipe.slicing.latency import relative_gap
from terapipe.slicing.tables import Grid
from terapipe.timeline import SIMULATED_EXTRAPOLATED

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
    extrapolated : bool
        Whether a slice of it has a cost beyond what was measured (see `CostModel.is_extrapolated`).
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
    extrapolated: bool
    n_evaluated: int
    candidates: pd.DataFrame

    @property
    def gap(self) -> float:
        """makespan_ms ÷ lower_bound_ms − 1: no slicing is better by more; 0 where both are 0."""
        return relative_gap(self.makespan_ms, self.lower_bound_ms)


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
        A family of forwards and full backwards with one stage a rank and without options; families
        of whole microbatches leave only the whole slice.
    memory, memory_cap_bytes : MemoryModel and float, optional
        With a cap no rank's peak (`memory.peak_bytes`) is above it.
    n_slices : int, optional
        Exactly so many slices a microbatch; default: any number up to `max_slices`.
    max_slices : int, optional
        Default 64, or as many as the slicing DP needs where up to 64 slices are all too long to be
        allowed.
    granularity_tokens, min_slice_tokens : int
        Slice lengths are multiples of the one and at least the other. Up to 2,048 multiples in a
        sequence the lower bound holds for any cost (see `bound_holds_for`).

    Raises
    ------
    SlicingError
        For sizes that do not fit, where every slicing is forbidden, or needs more than the cap.
    ScheduleError
        For an unknown family, one of another kind (use `best_schedule`), or one that runs no such slicings.
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
    problem = Problem(cost, grid, n_ranks, n_microbatches, schedule, n_slices, max_slices, memory, memory_cap_bytes)
    climber = Climber(problem)
    starts = _starts(climber)
    if _least(starts) == np.inf:
        allowed = allowed_start(problem)
        if allowed is not None and n_slices is None and max_slices is None:
            # The default limit must not make a problem impossible.
            problem = replace(problem, max_slices=max(MAX_SLICES, len(allowed)))
            climber = Climber(problem)
        if allowed is not None and climber.accepts(len(allowed)):
            starts.append(_scored(climber, f"slicing DP, {n_ranks} stages", allowed))
    only_whole = all(len(lengths) == 1 for _, lengths, _ in starts)
    bound = bound_step(replace(problem, n_slices=1, max_slices=None) if only_whole else problem)
    if bound.lengths is not None and climber.accepts(len(bound.lengths)):
        starts.append(_scored(climber, f"slicing DP, {n_ranks} stages", bound.lengths))
    found = _climb_best(climber, starts)
    best = min(found, key=lambda each: each[2])
    _refuse_impossible(problem, climber, best)
    return _result(climber, bound, found, best)


def _starts(climber: Climber) -> Found:
    """Starting slicings with their scores; no more slices once steps only get longer with their number."""
    problem, n_worse = climber.problem, 0
    starts: Found = []
    prefixes = prefix_ms(problem)
    for count in filter(climber.accepts, slice_counts(problem)):
        named = [("equal", uniform_start(problem, count)), ("equal time", equal_time_start(problem, count, prefixes))]
        if problem.memory is not None and problem.memory_cap_bytes is not None:
            named.append(("least memory", least_memory_start(problem, climber.replay(count), problem.memory)))
        scored = [_scored(climber, name, lengths) for name, lengths in (named if count > 1 else [("whole", named[0][1])])]
        best = _least(starts)  # infinite as long as all are forbidden: more slices may not be
        n_worse = 0 if best == np.inf or _least(scored) < best else n_worse + 1
        starts += scored
        if n_worse == N_WORSE:
            break
    if not starts:
        climber.replay(slice_counts(problem)[0])  # the family refuses it, and says why
    if any(len(lengths) > 1 for _, lengths, _ in starts):
        starts += [_scored(climber, *named) for named in program_starts(problem) if climber.accepts(len(named[1]))]
    return starts


def _least(found: Found) -> float:
    return min((score for _, _, score in found), default=np.inf)


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


def _refuse_impossible(problem: Problem, climber: Climber, best: tuple[str, Indices, float]) -> None:
    _, lengths, score = best
    if score < OVER_CAP:
        return
    tried, remedy = _limits(problem, climber)
    remedy += "other lengths (granularity_tokens, min_slice_tokens)"
    if np.isinf(score) or problem.memory is None:
        raise SlicingError(f"every slicing tried{tried} has a slice of infinite cost. Allow {remedy}, or a finite cost.")
    replay = climber.replay(len(lengths))
    least, weights = replay.peak_bytes(problem.memory, lengths[np.newaxis])[0], replay.held(problem.memory).weights.max()
    raise SlicingError(
        f"memory_cap_bytes={problem.memory_cap_bytes:g}: the least found{tried} needs {least:.0f} bytes on a rank under "
        f"{problem.family}, with {problem.slicing(lengths)}; weights alone are {weights}. Raise the cap, "
        f"or allow {remedy}."
    )


def _limits(problem: Problem, climber: Climber) -> tuple[str, str]:
    """What limits the number of slices, and what would widen it; both empty where nothing does."""
    try:
        climber.replay(2)
    except ScheduleError:
        return f" under {problem.family}, of whole microbatches,", "a family that takes slices ('seq1f1b'), "
    if problem.n_slices is not None:
        return f" with n_slices={problem.n_slices}", "another n_slices, "
    if problem.most_slices < problem.n_units // problem.min_units:
        return f" with at most max_slices={problem.most_slices}", "a larger max_slices, "
    return "", ""


def _result(climber: Climber, bound: Bound, found: Found, best: tuple[str, Indices, float]) -> SlicingSearch:
    problem = climber.problem
    slicing = problem.slicing(best[1])
    schedule = build_schedule(problem.family, problem.n_ranks, slicing)
    timeline = simulate(schedule, problem.cost)
    return SlicingSearch(
        slicing=slicing,
        makespan_ms=timeline.makespan_ms,
        lower_bound_ms=bound.lower_bound_ms,
        bound_holds_for=bound.holds_for,
        peak_bytes=np.nan if problem.memory is None else float(problem.memory.peak_bytes(schedule).max()),
        schedule=schedule,
        extrapolated=timeline.source == SIMULATED_EXTRAPOLATED,
        n_evaluated=climber.n_evaluated,
        candidates=_candidates(climber, found),
    )


def _candidates(climber: Climber, found: Found) -> pd.DataFrame:
    problem, rows = climber.problem, []
    for method, lengths, score in sorted(found, key=lambda each: each[2]):
        replay = climber.replay(len(lengths))
        makespan = replay.makespans_ms(*problem.times_ms(lengths[np.newaxis]))[0]
        peak = np.nan if problem.memory is None else replay.peak_bytes(problem.memory, lengths[np.newaxis])[0]
        rows.append((method, str(problem.slicing(lengths)), len(lengths), makespan, peak, score < OVER_CAP))
    names = ["method", "slicing", "n_slices", "makespan_ms", "peak_bytes", "fits"]
    return pd.DataFrame(rows, columns=names).drop_duplicates("slicing", ignore_index=True)
