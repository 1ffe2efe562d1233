"""The discrete-event back end: schedule + cost + link → Timeline. No processes, no torch."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.cost import CostModel, Link, Links, MemoryModel, as_times, check_links, find_link
from terapipe.errors import CostError, ScheduleError, TimelineError, as_number
from terapipe.schedule import Graph, Schedule, Starts, Transfers, earliest_starts
from terapipe.schedule.graph import KINDS
from terapipe.timeline import (
    COLUMNS,
    MEMORY_COLUMNS,
    SIMULATED,
    SIMULATED_EXTRAPOLATED,
    Step,
    Timeline,
    check_contention,
    match,
    replayed,
)


def simulate(
    schedule: Schedule,
    cost: CostModel | Sequence[CostModel],
    link: Links | None = None,
    bytes_per_token: float = 0,
    contention: float = 1.0,
    memory: MemoryModel | None = None,
) -> Timeline:
    """When every action of a schedule runs, if slices cost what `cost` says.

    Parameters
    ----------
    schedule : Schedule
        Any valid schedule.
    cost : CostModel or list of CostModel
        Of one stage; a list names one for each stage. Where a slice's cost lies beyond what was
        measured, the timeline's source is "simulated, extrapolated".
    link : Link or {(source rank, target rank): Link}, optional
        Free messages by default.
    bytes_per_token : float
        Size of a message: this times the tokens of its slice, in all its sequences.
    contention : float
        ≥ 1: while two or more ranks compute, each progresses at 1/contention.
    memory : MemoryModel, optional
        Gives the bytes of `timeline.memory`, which has units alone without it.

    Raises
    ------
    ScheduleError
        Where the schedule is invalid.
    CostError
        For a forbidden (infinite) slice, what is no link or a missing one, a contention below 1, a memory model of
        other stages.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost = tp.CallableCost(lambda l, c, b: l, lambda l, c, b: 2 * l)
    >>> schedule = tp.build_schedule("terapipe", 4, tp.uniform_slicing(8, 8))
    >>> tp.simulate(schedule, cost).makespan_ms
    33.0
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{schedule!r} is not a schedule; build one with build_schedule or Schedule.from_orders.")
    check_links(link)
    check_contention(contention)
    if not 0 <= as_number(bytes_per_token) < np.inf:
        raise CostError(f"bytes_per_token={bytes_per_token!r}: needs a finite number ≥ 0.")
    if memory is not None and not isinstance(memory, MemoryModel):
        raise CostError(f"memory={memory!r}: needs a MemoryModel, e.g. MemoryModel(model, dtype).")
    graph = schedule.graph
    n_bytes = _message_bytes(graph, bytes_per_token)
    durations = action_durations(graph, cost)
    starts = earliest_starts(graph, durations, _transfers(graph, link, n_bytes), contention)
    source = _source(graph, cost)
    if memory is None:
        return Timeline(lambda: _frame(graph, source, n_bytes, starts), alone_ms=durations, cost=cost)
    memory.check(schedule)  # before anyone looks
    return Timeline(
        lambda: _frame(graph, source, n_bytes, starts),
        lambda: memory.held(schedule).assign(step=0, time_ms=starts.end_ms)[MEMORY_COLUMNS],
        durations,
        cost,
    )


def replay(timeline: Timeline, schedule: Schedule | None = None, link: Links | None = None) -> Timeline:
    """The measured steps of a timeline with their own durations, in another order or over other links.

    Every step is replayed on its own. An action takes as long as it took there, whatever runs beside it:
    contention and noise stay in the durations. In the order that ran, gaps of the runtime stay too, so that
    without a link the timeline comes back; under another schedule every action has the step's median gap.

    A simulated step has no runtime: its gaps are sends that block their rank (`Link.overlap`). Over another
    link that link says what blocks; under another schedule alone, once any send was seen to block, all do but
    between ranks where one was seen to let its rank go on before it arrived. In a measured or emulated step over a
    link that blocks, the time for which a send held its rank cannot be told from the runtime's: it stays a
    gap, over another link too, which then adds its own.

    Parameters
    ----------
    timeline : Timeline
        Measured, emulated, simulated or given.
    schedule : Schedule, optional
        Of the same stages, microbatches and slices, on any ranks; by default, and for the same orders, the
        order that ran. A B takes what its I and W took.
    link : Link or {(source rank, target rank): Link}, optional
        By default messages take as long as they took: those that a rank waited for as measured, others no
        longer than the median of these between the same ranks (`timeline.step`).

    Returns
    -------
    Timeline
        Of source "replayed", with the source of the durations after it where they were not measured, and
        "link given" where the run had a link of its spec.

    Raises
    ------
    TimelineError
        For a step that did not run the schedule's actions, or I and W of a backward recorded in one; for a
        link with a bandwidth where the sizes of messages are unknown.
    ScheduleError, CostError
        Where the schedule is invalid; for what is no link, and for a missing one.
    """
    if not isinstance(timeline, Timeline):
        raise TimelineError(f"{timeline!r} is not a timeline; give one: run.timeline, tp.simulate(…), Timeline.from_frame(…).")
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ScheduleError(f"{schedule!r} is not a schedule; build one with build_schedule or Schedule.from_orders.")
    check_links(link)
    steps = [_replay_step(Step.read(rows), schedule, link) for _, rows in timeline.measured.groupby("step")]
    return Timeline(pd.concat(steps, ignore_index=True)[COLUMNS])


def _replay_step(step: Step, schedule: Schedule | None, link: Links | None) -> pd.DataFrame:
    matched = None if schedule is None else match(step, schedule)
    if schedule is None or matched is None or _is_the_order(step, schedule):
        graph, rows, durations, lags = step.graph, step.rows, step.duration_ms, step.lag_ms
        # Modelled gaps are what the old link's sends held their ranks for: another link has its own.
        before = step.release_ms + (0.0 if step.is_simulated and link is not None else step.gap_ms)
        blocks = np.zeros(graph.n_actions, dtype=bool)
    else:
        graph = schedule.graph
        rows, durations, lags, before, blocks = matched
    free = np.zeros(graph.n_actions)
    transfers = Transfers(free, lags, blocks) if link is None else _given_transfers(graph, link, rows)
    # A gap is time of its action that the rank spends before it starts.
    starts = earliest_starts(graph, before + durations, transfers)
    texts = np.array([*map(str, chain(*graph.orders)), ""], dtype=object)
    return rows.assign(
        source=[replayed(source) for source in rows["source"]],
        start_ms=step.begin_ms + starts.start_ms + before,
        end_ms=step.begin_ms + starts.end_ms,
        ready_ms=step.begin_ms + starts.ready_ms,
        blocked_by=texts[starts.blocked_by],
    )


def _is_the_order(step: Step, schedule: Schedule) -> bool:
    """Whether the step ran the schedule's own orders, on the ranks that it names."""
    return schedule.orders == step.graph.orders and bool((step.rows["rank"].to_numpy() == schedule.graph.rank).all())


def _given_transfers(graph: Graph, link: Links, rows: pd.DataFrame) -> Transfers | None:
    ranks = sorted(rows["rank"].unique().tolist())
    if ranks != list(range(len(ranks))):
        raise TimelineError(f"link={link!r} names ranks 0…n−1, and this timeline has the ranks {ranks}; number them so.")
    transfers = _transfers(graph, link, rows["n_bytes"].to_numpy(np.float64))
    links = [link] if isinstance(link, Link) else link.values()
    if graph.crosses.any() and not rows["n_bytes"].any() and any(each.transmission_ms(1.0) > 0 for each in links):
        raise TimelineError(
            f"link={link!r} has a bandwidth, and this timeline does not know the size of its messages (n_bytes are 0). "
            "Simulate with bytes_per_token, fill in n_bytes, or give a latency only."
        )
    return transfers


def action_durations(graph: Graph, cost: CostModel | Sequence[CostModel]) -> npt.NDArray[np.float64]:
    """Milliseconds of every action of a graph, in its order."""
    n_stages = len(graph.stage_to_rank)
    costs = [cost] * n_stages if isinstance(cost, CostModel) else list(cost)
    if len(costs) != n_stages:
        raise CostError(f"{len(costs)} cost models for {n_stages} stages; give one for all, or one for each.")
    lengths, contexts, sequences = graph.slicing.units[:, 2:].T
    times = np.empty((len(KINDS), n_stages, len(lengths)))
    for stage, model in enumerate(costs):
        functions = (model.forward_ms, model.backward_ms, model.input_ms, model.weight_ms)
        used = set(graph.kind[graph.stage == stage])
        for code, function in enumerate(functions):
            if code in used:
                times[code, stage] = as_times(function(lengths, contexts, sequences), lengths, contexts, sequences)
    durations: npt.NDArray[np.float64] = times[graph.kind, graph.stage, graph.unit]
    if np.isinf(durations).any():
        action = graph.action(int(np.flatnonzero(np.isinf(durations))[0]))
        raise CostError(f"{action} has an infinite cost: that slice is forbidden. Choose another slicing.")
    return durations


def _source(graph: Graph, cost: CostModel | Sequence[CostModel]) -> str:
    costs = [cost] if isinstance(cost, CostModel) else cost
    beyond = any(bool(np.any(each.is_extrapolated(*graph.slicing.units[:, 2:].T))) for each in costs)
    return SIMULATED_EXTRAPOLATED if beyond else SIMULATED


def _message_bytes(graph: Graph, bytes_per_token: float) -> npt.NDArray[np.float64]:
    tokens = (graph.slicing.units[:, 2] * graph.slicing.units[:, 4])[graph.unit]
    return np.where(graph.crosses, tokens * bytes_per_token, 0.0)


def _transfers(graph: Graph, link: Links | None, n_bytes: npt.NDArray[np.float64]) -> Transfers | None:
    if link is None:
        return None
    crosses, receiver = graph.crosses, graph.receiver
    transmission, latency, blocks = np.zeros(graph.n_actions), np.zeros(graph.n_actions), np.zeros(graph.n_actions, dtype=bool)
    pairs = sorted({(int(a), int(b)) for a, b in zip(graph.rank[crosses], receiver[crosses], strict=True)})
    for pair in pairs:
        used = find_link(link, *pair)
        here = crosses & (graph.rank == pair[0]) & (receiver == pair[1])
        transmission[here] = used.transmission_ms(1.0) * n_bytes[here]
        latency[here], blocks[here] = used.latency_ms, not used.overlap
    return Transfers(transmission, latency, blocks)


def _frame(graph: Graph, source: str, n_bytes: npt.NDArray[np.float64], starts: Starts) -> pd.DataFrame:
    units = graph.slicing.units[graph.unit]
    texts = np.array([*map(str, chain(*graph.orders)), ""], dtype=object)
    columns = {
        "source": source,
        "step": 0,
        "rank": graph.rank,
        "stage": graph.stage,
        "kind": np.array([kind.value for kind in KINDS], dtype=object)[graph.kind],
        "microbatch": units[:, 0],
        "slice": units[:, 1],
        "n_sequences": units[:, 4],
        "slice_tokens": units[:, 2],
        "context_tokens": units[:, 3],
        "start_ms": starts.start_ms,
        "end_ms": starts.end_ms,
        "ready_ms": starts.ready_ms,
        "blocked_by": texts[starts.blocked_by],
        "n_bytes": n_bytes,
    }
    return pd.DataFrame(columns)[COLUMNS]
