"""The step times of a schedule family for many slicings at once. Knows the order of actions, no costs.

The orders of a family depend on the numbers of slices only, so they are built once for each number
and timed again for every slicing. Without messages and contention an action starts when the last
of its inputs and of its rank's earlier actions has ended: one pass in a fixed topological order.
What `tp.simulate` gives is the same; this is the part of it that a search repeats.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from terapipe.cost import MemoryModel
from terapipe.cost.held import find_changes, running_sums
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
        self._held: tuple[MemoryModel, Held] | None = None

    def makespans_ms(self, forward_ms: Floats, backward_ms: Floats) -> Floats:
        """Step time of each slicing; both arrays have one row a slicing, one column a slice."""
        from terapipe.search.passes import longest_paths

        durations = np.ascontiguousarray(np.concatenate([forward_ms, backward_ms], axis=1))
        times: Floats = longest_paths(self.inputs, self.rows, durations)
        return times

    def peak_bytes(self, memory: MemoryModel, slice_tokens: Indices) -> Floats:
        """Most bytes of any rank, for each slicing of microbatches of one sequence: what `memory.peak_bytes` finds."""
        held = self.held(memory)
        sliced, whole = slice_tokens @ held.per_slice_token.T, slice_tokens.sum(axis=1, keepdims=True) * held.per_token
        peaks: Floats = (sliced + whole + held.weights).max(axis=1).astype(np.float64)
        return peaks

    def held(self, memory: MemoryModel) -> "Held":
        """The different states of all ranks that may be a peak, in bytes of a memory model."""
        if self._held is None or self._held[0] is not memory:
            self._held = memory, _held_states(self._schedule, memory)
        return self._held[1]


class Held(NamedTuple):
    """What ranks hold once an action has ended, a state a row.

    Attributes
    ----------
    per_slice_token : integer array (n_states, n_slices)
        Bytes for each token of a slice: of the units held, and of the weight queue.
    per_token : integer array (n_states,)
        Bytes for each token of a sequence: keys and values of the microbatches alive.
    weights : integer array (n_states,)
        Bytes of the rank's parameters.
    """

    per_slice_token: Indices
    per_token: Indices
    weights: Indices


def _held_states(schedule: Schedule, memory: MemoryModel) -> Held:
    changes, n_slices = find_changes(schedule.orders), schedule.slicing.microbatches[0].n_slices
    token, position, queue, context, _ = np.array(memory.stages(schedule.stage_to_rank), dtype=np.int64)[changes.stage].T
    unit_bytes = changes.activations * (token + position) + changes.queued * queue  # one sequence: a position is a token
    table = np.zeros((len(unit_bytes), n_slices + 1), dtype=np.int64)
    table[np.arange(len(unit_bytes)), changes.slice] = unit_bytes
    table[:, -1] = changes.contexts * context
    sums = running_sums(changes.rank, table)
    # What comes before a forward, or after a B or W, is less than what comes after, or before.
    is_forward = changes.units > 0
    more_follows = np.append(is_forward[1:] & (np.diff(changes.rank) == 0), False)
    may_peak = (changes.activations != 0) & (changes.units >= 0) & ~more_follows
    weights = np.array(memory.rank_weight_bytes(schedule.stage_to_rank))[changes.rank]
    states = np.unique(np.column_stack([sums, weights])[may_peak], axis=0)
    return Held(states[:, :-2], states[:, -2], states[:, -1])
