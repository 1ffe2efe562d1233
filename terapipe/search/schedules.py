"""Schedule families and slicings, each simulated, ranked by their step: which is best under a memory cap?

The candidates do not depend on the cap, which only leaves some of them out: a larger cap never gives
a slower answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from terapipe.cost import CostModel, MemoryModel, StageShare, as_times
from terapipe.cost.held import find_changes, running_sums
from terapipe.errors import CostError, ScheduleError, check_integer, unknown_name
from terapipe.schedule import FAMILIES, Kind, Schedule, build_schedule
from terapipe.search.candidates import equal_time_start, prefix_ms, program_starts, slice_counts, uniform_start
from terapipe.search.problem import Problem
from terapipe.search.replay import Indices
from terapipe.simulator import simulate
from terapipe.slicing import Slicing
from terapipe.slicing.tables import Grid
from terapipe.timeline import SIMULATED_EXTRAPOLATED

MAX_SLICES = 16
N_CAPS = 6  # values of max_in_flight tried for svpp
COLUMNS = [
    *("family", "chunks_per_rank", "options", "method", "n_slices", "slicing"),
    *("makespan_ms", "bubble_fraction", "peak_activations", "peak_bytes", "extrapolated"),
]
TRAINING = tuple(name for name, family in FAMILIES.items() if family.kinds != "F")


def best_schedule(
    cost: CostModel,
    seq_tokens: int,
    n_ranks: int,
    n_microbatches: int = 1,
    memory: MemoryModel | None = None,
    memory_cap_bytes: float | None = None,
    families: Sequence[str] | str = TRAINING,
    *,
    chunks_per_rank: Sequence[int] = (1, 2),
    granularity_tokens: int = 1,
    min_slice_tokens: int = 1,
    max_slices: int = MAX_SLICES,
) -> pd.DataFrame:
    """Rank schedule families, their options and slicings by their simulated step.

    Microbatches hold one sequence each and are cut alike: into equal slices, slices of equal time,
    and as the slicing DP says. Every candidate is simulated; there is no proof that nothing else is
    better.

    Parameters
    ----------
    cost : CostModel
        Of one rank's layers. A rank with v stages runs each in 1/v of that (`StageShare`), an
        assumption that flatters many stages where a slice has a cost of its own (launching kernels).
        Where its weight_ms is more than its backward_ms, what runs the halves apart is left out.
    seq_tokens, n_ranks, n_microbatches : int
        Tokens of a sequence, pipeline ranks, microbatches in a step.
    memory : MemoryModel, optional
        Of the whole model, its layers divided over the stages (`MemoryModel(model, dtype)`); one with
        n_layers=… of a rank's layers. What cannot be cut into so many stages is left out.
    memory_cap_bytes : float, optional
        Leaves out what needs more on any rank. The others stay as they are.
    families : list of str, or one
        Default: all that train.
    chunks_per_rank : list of int
        Stages a rank to try, for families that take any number.
    granularity_tokens, min_slice_tokens, max_slices : int
        Slice lengths are multiples of the one and at least the other; so many in a microbatch at most.

    Returns
    -------
    DataFrame
        The shortest step first: family, chunks_per_rank, options (dict), method, n_slices (of a
        microbatch), slicing, makespan_ms, bubble_fraction, peak_activations (of the rank with most;
        1 = a microbatch's on one rank), peak_bytes (NaN without `memory`), extrapolated (a slice's
        cost lies beyond what was measured).
        `build_schedule(row.family, n_ranks, row.slicing, row.chunks_per_rank, **row.options)` builds one.

    Raises
    ------
    ScheduleError
        For an unknown family, one of forwards alone, where none can run, or none fits the cap: the
        least need is named.
    CostError, SlicingError
        For a cap without a memory model, and sizes that do not fit.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost = tp.CallableCost(lambda l, c, b: 1 + l / 64, lambda l, c, b: 2 + l / 32)
    >>> found = tp.best_schedule(cost, 1024, n_ranks=4, n_microbatches=2, families=["1f1b", "terapipe", "seq1f1b"])
    >>> best = found.iloc[0]
    >>> best["family"], best["slicing"], float(best["makespan_ms"])
    ('seq1f1b', '[(1, [205] * 4 + [204])] * 2', 163.828125)
    """
    families = _checked(families)
    chunk_counts = sorted({check_integer("chunks_per_rank", each, 1, ScheduleError) for each in chunks_per_rank})
    grid = Grid(seq_tokens, granularity_tokens, min_slice_tokens)
    problem = Problem(cost, grid, n_ranks, n_microbatches, "terapipe", None, max_slices, memory, memory_cap_bytes)
    cuts = _cuts(problem)
    candidates = [each for name in families for each in _candidates(problem, name, cuts, chunk_counts)]
    if not candidates:
        raise ScheduleError(f"none of {families} can run {n_microbatches} microbatches on {n_ranks} ranks.")
    rows = [each.measure(problem) for each in tqdm(candidates, unit="schedule", delay=2, leave=False)]
    table = pd.DataFrame([row for row in rows if not isinstance(row, str)], columns=COLUMNS)
    if table.empty:
        reasons = dict.fromkeys(row for row in rows if isinstance(row, str))
        raise ScheduleError(f"every candidate is left out: {' '.join(reasons)}")
    return _ranked(table, memory_cap_bytes)


def _checked(families: Sequence[str] | str) -> list[str]:
    """The names, each once; refused where one is unknown or does not train."""
    names = list(dict.fromkeys([families] if isinstance(families, str) else families))
    for name in names:
        if name not in FAMILIES:
            raise ScheduleError(unknown_name("schedule", name, FAMILIES))
        if FAMILIES[name].kinds == "F":
            raise ScheduleError(
                f"families={names}: {name} runs forwards alone, which is no training step to rank beside others. "
                "Leave it out; simulate it by itself (build_schedule and simulate)."
            )
    return names


def _ranked(table: pd.DataFrame, cap: float | None) -> pd.DataFrame:
    fitting = table if cap is None else table[table["peak_bytes"] <= cap]
    if fitting.empty:
        least = table.sort_values("peak_bytes").iloc[0]
        raise ScheduleError(
            f"memory_cap_bytes={cap:g}: of {len(table)} candidates the least need is {least['peak_bytes']:.0f} bytes on a "
            f"rank, with {least['family']} and {least['slicing']}. Raise the cap, or allow more slices (max_slices) or "
            "families."
        )
    return fitting.sort_values(["makespan_ms", "peak_activations", "n_slices"], kind="stable", ignore_index=True)


@dataclass(frozen=True)
class _Cut:
    method: str
    slicing: Slicing
    n_slices: int


@dataclass(frozen=True)
class _Candidate:
    family: str
    chunks: int
    options: Mapping[str, int]
    cut: _Cut
    schedule: Schedule
    memory: MemoryModel | None

    def measure(self, problem: Problem) -> tuple[Any, ...] | str:
        """Its row, or why it has none: a forbidden slice, or halves of the backward that cannot be."""
        slicing, schedule = self.cut.slicing, self.schedule
        wrong = _find_wrong(problem, np.array(slicing.microbatches[0].slice_tokens), schedule)
        if wrong:
            return wrong
        timeline = simulate(schedule, StageShare(problem.cost, self.chunks))
        return (
            *(self.family, self.chunks, dict(self.options), self.cut.method, self.cut.n_slices, str(slicing)),
            *(timeline.makespan_ms, timeline.bubble_fraction, _peak_activations(schedule, self.chunks)),
            np.nan if self.memory is None else float(self.memory.peak_bytes(schedule).max()),
            timeline.source == SIMULATED_EXTRAPOLATED,
        )


def _find_wrong(problem: Problem, lengths: Indices, schedule: Schedule) -> str:
    """What keeps a slicing's costs from being simulated; "" for nothing."""
    cost, contexts = problem.cost, lengths.cumsum() - lengths
    times = [*problem.times_ms(lengths[np.newaxis])]
    if Kind.W in schedule.kinds:
        times.append(as_times(cost.weight_ms(lengths, contexts, 1), lengths, contexts))
        try:  # all else that the cost model may refuse, it has refused above
            times.append(as_times(cost.input_ms(lengths, contexts, 1), lengths, contexts))
        except CostError as error:
            return str(error)
    if not all(np.isfinite(each).all() for each in times):
        return "a slice has an infinite cost. Allow other lengths, or a finite cost."
    return ""


def _cuts(problem: Problem) -> dict[int, list[_Cut]]:
    """Different slicings to try, by their number of slices."""
    found: dict[int, dict[Slicing, _Cut]] = {}
    prefixes = prefix_ms(problem)
    for method, lengths in (
        *(("equal", uniform_start(problem, count)) for count in slice_counts(problem)),
        *(("equal time", equal_time_start(problem, count, prefixes)) for count in slice_counts(problem)),
        *program_starts(problem),
    ):
        slicing, count = problem.slicing(lengths), len(lengths)
        found.setdefault(count, {}).setdefault(slicing, _Cut(method if count > 1 else "whole", slicing, count))
    return {count: list(cuts.values()) for count, cuts in sorted(found.items())}


def _candidates(
    problem: Problem, name: str, cuts: Mapping[int, Sequence[_Cut]], chunk_counts: Sequence[int]
) -> Iterator[_Candidate]:
    """A family on each slicing, with each number of stages and each option, as far as it can run them."""
    family = FAMILIES[name]
    for chunks, count in product(chunk_counts if family.any_chunks else [family.chunks], cuts):
        for options in _options(problem, name, count, chunks):
            try:
                built = build_schedule(name, problem.n_ranks, cuts[count][0].slicing, chunks, **options)
                memory = None if problem.memory is None else _memory_of(problem.memory, chunks)
                if memory is not None:
                    memory.stages(built.stage_to_rank)
            except (ScheduleError, CostError):  # the family cannot run this, or the model has too few layers
                continue
            for cut in cuts[count]:  # the order depends on the numbers of slices only
                yield _Candidate(name, chunks, options, cut, replace(built, slicing=cut.slicing), memory)


def _memory_of(memory: MemoryModel, chunks: int) -> MemoryModel:
    """The model of each of `chunks` stages of a rank."""
    if not isinstance(memory.n_layers, int):
        return memory
    if memory.n_layers % chunks:
        raise CostError(f"{memory.n_layers} layers of a rank cannot be cut into {chunks} equal stages.")
    return replace(memory, n_layers=memory.n_layers // chunks)


def _options(problem: Problem, name: str, n_slices: int, chunks: int) -> list[dict[str, int]]:
    """None, or a few caps for svpp, from about the least that any rank needs to all units."""
    if "max_in_flight" not in FAMILIES[name].options:
        return [{}]
    most = n_slices * problem.n_microbatches * chunks
    least = min(n_slices, most)
    return [{"max_in_flight": int(cap)} for cap in np.unique(np.geomspace(least, most, N_CAPS).round())]


def _peak_activations(schedule: Schedule, chunks: int) -> float:
    """Most tokens that a rank holds from F to B or W, ÷ those of a microbatch on all of its stages."""
    graph, changes = schedule.graph, find_changes(schedule.orders)
    held = running_sums(changes.rank, changes.units * graph.slicing.units[:, 2][graph.unit])
    return float(held.max() / (graph.slicing.seq_tokens * chunks))
