"""The step times of a schedule family for many slicings at once. Knows the order of actions, no costs.

The orders of a family depend on the numbers of slices only, so they are built once for each number
and timed again for every slicing. Without messages and contention an action starts when the last
of its inputs and of its rank's earlier actions has ended: one pass in a fixed topological order.
What `tp.simulate` gives is the same; this is the part of it that a search repeats.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from terapipe.cost import MemoryModel
from terapipe.schedule import Schedule, build_schedule
from terapipe.schedule.graph import B_CODE
from terapipe.slicing import uniform_slicing

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Replay:
    """One family on `n_ranks` ranks, with `n_microbatches` microbatches cut alike into `n_slices` slices."""

    def __init__(self, family: str, n_ranks: int, n_microbatches: int, n_slices: int) -> None:
        from terapipe.search.passes import topological_order  # numba loads only where it is needed

        schedule = build_schedule(family, n_ranks, uniform_slicing(n_slices, n_slices, n_microbatches))
        graph = schedule.graph
        rank_starts = np.searchsorted(graph.rank, np.arange(n_ranks + 1))
        order = topological_order(graph.dependencies, rank_starts)
        before = np.where(graph.step > 0, np.arange(graph.n_actions) - 1, -1)
        inputs = np.column_stack([graph.dependencies, before])
        place = np.empty(graph.n_actions + 1, dtype=np.int64)
        place[order], place[-1] = np.arange(graph.n_actions), graph.n_actions  # index −1: no input, always at time 0
        self.inputs = place[inputs[order]]
        self.rows = ((graph.kind == B_CODE) * n_slices + graph.unit % n_slices)[order]
        self.n_actions = graph.n_actions
        self._schedule = schedule

    def makespans_ms(self, forward_ms: Floats, backward_ms: Floats) -> Floats:
        """Step time of each slicing; both arrays have one row a slicing, one column a slice."""
        from terapipe.search.passes import longest_paths

        durations = np.ascontiguousarray(np.concatenate([forward_ms, backward_ms], axis=1))
        times: Floats = longest_paths(self.inputs, self.rows, durations)
        return times

    def peak_bytes(self, memory: MemoryModel, slice_tokens: Indices) -> Floats:
        """Most bytes of any rank, for each slicing of microbatches of one sequence: what `memory.peak_bytes` finds."""
        counts, n_live = self.held
        activations = memory.activation_bytes_per_token * (slice_tokens @ counts.T)
        contexts = memory.context_bytes_per_token * slice_tokens.sum(axis=1, keepdims=True) * n_live
        peaks: Floats = (memory.weight_bytes + (activations + contexts).max(axis=1)).astype(np.float64)
        return peaks

    @cached_property
    def held(self) -> tuple[Indices, Indices]:
        """The different states of all ranks after a forward: units held of each slice, and microbatches alive."""
        return _held_states(self._schedule)


def _held_states(schedule: Schedule) -> tuple[Indices, Indices]:
    n_slices = schedule.slicing.microbatches[0].n_slices
    states: set[tuple[int, ...]] = set()
    for order in schedule.orders:
        held = [0] * n_slices
        n_left: dict[int, int] = {}
        for action in order:
            if action.kind == "F":
                held[action.slice] += 1
                n_left.setdefault(action.microbatch, n_slices)
                states.add((*held, len(n_left)))
            else:
                held[action.slice] -= 1
                n_left[action.microbatch] -= 1
                if n_left[action.microbatch] == 0:
                    del n_left[action.microbatch]
    table = np.array(sorted(states), dtype=np.int64)
    return table[:, :-1], table[:, -1]
