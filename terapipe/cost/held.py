"""What each rank holds once each action of a schedule has ended. Knows no times, and no model's shape.

A unit (a microbatch's slice on a stage) is held from the end of its F to the end of its B, or of its
W where its backward is split. Its activations go at its B or I already; from I to W the weight queue
holds it instead. Keys and values of a microbatch, and their gradients, are held from its first F to
its last B or I, which both are slice 0's. A unit that never goes backward is held to the end.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

if TYPE_CHECKING:
    from terapipe.cost.memory import StageMemory

Indices = npt.NDArray[np.int64]
HELD_COLUMNS = ["units", "activation_bytes", "context_bytes", "queue_bytes", "weight_bytes", "total_bytes"]


class Ordered(Protocol):
    """What is read of a schedule."""

    @property
    def orders(self) -> Sequence[Sequence[Any]]:
        """Each rank's actions: stage, kind, microbatch, slice."""

    @property
    def slicing(self) -> Any:
        """`units`, a row a slice (…, length, context, sequences), `first_units` and `seq_tokens`."""

    @property
    def stage_to_rank(self) -> Sequence[int]:
        """The rank of each stage."""


class Changes(NamedTuple):
    """Per action, in rank order: +1 where it begins to hold something, −1 where it lets go, else 0."""

    rank: Indices
    stage: Indices
    microbatch: Indices
    slice: Indices
    units: Indices
    activations: Indices
    queued: Indices
    contexts: Indices


def find_changes(orders: Sequence[Sequence[Any]]) -> Changes:
    """What each action of each rank begins and ends to hold."""
    stages, kinds, microbatches, slices = zip(*chain(*orders), strict=True)
    kind, place = np.array([str(each) for each in kinds]), np.array(slices, dtype=np.int64)
    forward, whole, inputs, weights = (kind == each for each in "FBIW")
    backward = whole | inputs
    return Changes(
        rank=np.repeat(np.arange(len(orders)), [len(order) for order in orders]),
        stage=np.array(stages, dtype=np.int64),
        microbatch=np.array(microbatches, dtype=np.int64),
        slice=place,
        units=forward.astype(np.int64) - (whole | weights),
        activations=forward.astype(np.int64) - backward,
        queued=inputs.astype(np.int64) - weights,
        contexts=(place == 0) * (forward.astype(np.int64) - backward),
    )


def running_sums(rank: Indices, changes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sums over each rank's actions so far; `changes` is in rank order, its first axis the actions."""
    sums = changes.cumsum(axis=0)
    starts = np.flatnonzero(np.diff(rank, prepend=-1))
    before = np.concatenate([np.zeros_like(sums[:1]), sums])[starts]
    lengths = np.diff(np.append(starts, len(rank)))
    found: npt.NDArray[Any] = sums - np.repeat(before, lengths, axis=0)
    return found


def find_held(schedule: Ordered, stages: Sequence["StageMemory"], rank_weight_bytes: Sequence[int]) -> pd.DataFrame:
    """Rank, units and bytes (`HELD_COLUMNS`) once each action has ended; one row an action, in rank order."""
    changes, slicing = find_changes(schedule.orders), schedule.slicing
    sizes = np.array(stages, dtype=np.int64)[changes.stage].T
    unit = np.array(slicing.first_units)[changes.microbatch] + changes.slice
    length, sequences = slicing.units[unit, 2], slicing.units[unit, 4]
    tokens = length * sequences
    parts = {
        "units": changes.units,
        "activation_bytes": changes.activations * (sizes[0] * tokens + sizes[1] * length),
        "context_bytes": changes.contexts * sizes[3] * sequences * slicing.seq_tokens,
        "queue_bytes": changes.queued * sizes[2] * tokens,
    }
    frame = pd.DataFrame({"rank": changes.rank} | {name: running_sums(changes.rank, each) for name, each in parts.items()})
    frame["weight_bytes"] = np.array(rank_weight_bytes)[changes.rank]
    frame["total_bytes"] = frame[HELD_COLUMNS[1:-1]].sum(axis=1)
    return frame
