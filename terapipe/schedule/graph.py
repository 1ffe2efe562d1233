"""A schedule's actions as flat arrays, and what must end before each may start.

The dependencies, for stage g, microbatch m, slice s (TeraPipe, ICML 2021):

    F(g,m,s)  after  F(g−1,m,s)  and  F(g,m,s−1)
    B(g,m,s)  after  F(g,m,s),  B(g+1,m,s)  and  B(g,m,s+1);   I as B
    W(g,m,s)  after  I(g,m,s)

The backward runs the last slice first, as later slices send gradients back to the keys and values
of earlier ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from terapipe.schedule.action import Action, Kind
from terapipe.slicing import Slicing

Indices = npt.NDArray[np.int64]
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)  # codes 0…3 in `Graph.kind`
_CODES = {kind: code for code, kind in enumerate(KINDS)}
F_CODE, B_CODE, I_CODE, W_CODE = range(4)

# Columns of `Graph.dependencies`: the neighbouring stage, the neighbouring slice, the own earlier half.
NEIGHBOUR_STAGE, NEIGHBOUR_SLICE, OWN = range(3)


@dataclass(frozen=True, eq=False)
class Graph:
    """Actions in rank order; index i is the i-th action of rank 0, then of rank 1, ….

    Attributes
    ----------
    rank, step, kind, stage, unit : integer arrays
        `step` is the place in the rank's order, `kind` indexes `KINDS`, `unit` a row of
        `slicing.units`.
    dependencies : integer array (n_actions, 3)
        Index of the action that must end first, −1 where there is none; by neighbouring stage (the
        only one that can be on another rank), neighbouring slice, and own earlier half.
    """

    orders: tuple[tuple[Action, ...], ...]
    slicing: Slicing
    stage_to_rank: tuple[int, ...]
    rank: Indices
    step: Indices
    kind: Indices
    stage: Indices
    unit: Indices
    dependencies: Indices

    @property
    def n_actions(self) -> int:
        """Number of compute actions."""
        return len(self.rank)

    def action(self, index: int) -> Action:
        """The action at a flat index."""
        return self.orders[int(self.rank[index])][int(self.step[index])]

    @property
    def crosses(self) -> npt.NDArray[np.bool_]:
        """Whether each action's output goes to another rank: F to the next stage, B and I to the one before."""
        last = len(self.stage_to_rank) - 1
        goes_on = np.where(self.kind == F_CODE, self.stage < last, (self.kind != W_CODE) & (self.stage > 0))
        crossing: npt.NDArray[np.bool_] = goes_on & (self.receiver != self.rank)
        return crossing

    @property
    def receiver(self) -> Indices:
        """The rank of the stage that each action's output goes to; clipped at the pipeline's ends."""
        step = np.where(self.kind == F_CODE, 1, -1)
        homes = np.asarray(self.stage_to_rank)
        return homes[np.clip(self.stage + step, 0, len(homes) - 1)]


def index_actions(orders: Sequence[Sequence[Action]], slicing: Slicing) -> dict[str, Indices]:
    """Flat arrays of a schedule: those of `Graph`, with unit −1 for a slice that does not exist."""
    lengths = [len(order) for order in orders]
    stages, kinds, microbatches, slices = zip(*chain(*orders), strict=True) if sum(lengths) else ((), (), (), ())
    microbatch, place = np.array(microbatches, dtype=np.int64), np.array(slices, dtype=np.int64)
    n_slices = np.array([each.n_slices for each in slicing.microbatches])
    known = np.minimum(microbatch, len(n_slices) - 1)
    exists = (known == microbatch) & (place < n_slices[known])
    return {
        "rank": np.repeat(np.arange(len(orders)), lengths),
        "step": np.concatenate([np.arange(length) for length in lengths]),
        "kind": np.array([_CODES[kind] for kind in kinds], dtype=np.int64),
        "stage": np.array(stages, dtype=np.int64),
        "unit": np.where(exists, np.array(slicing.first_units)[known] + place, -1),
    }


def find_positions(columns: dict[str, Indices], n_stages: int, n_units: int) -> Indices:
    """Flat index of each (kind, stage, unit), −1 where absent."""
    positions = np.full((len(KINDS), n_stages, n_units), -1, dtype=np.int64)
    positions[columns["kind"], columns["stage"], columns["unit"]] = np.arange(len(columns["rank"]))
    return positions


def find_dependencies(columns: dict[str, Indices], positions: Indices, slicing: Slicing) -> Indices:
    """The (n_actions, 3) table of `Graph.dependencies`, for a complete schedule."""
    kind, stage, unit = columns["kind"], columns["stage"], columns["unit"]
    n_stages, n_units = positions.shape[1:]
    microbatch = slicing.units[:, 0]
    is_first = np.append(True, np.diff(microbatch) != 0)[unit]
    is_last = np.append(np.diff(microbatch) != 0, True)[unit]
    forward, weight = kind == F_CODE, kind == W_CODE
    backward = ~forward & ~weight
    # B and I of one (stage, unit) exclude each other: one table serves both.
    backwards = np.maximum(positions[B_CODE], positions[I_CODE])
    below, above = np.maximum(stage - 1, 0), np.minimum(stage + 1, n_stages - 1)
    before, after = np.maximum(unit - 1, 0), np.minimum(unit + 1, n_units - 1)

    table = np.full((len(kind), 3), -1, dtype=np.int64)
    table[:, NEIGHBOUR_STAGE] = np.select(
        [forward & (stage > 0), backward & (stage < n_stages - 1)], [positions[F_CODE][below, unit], backwards[above, unit]], -1
    )
    table[:, NEIGHBOUR_SLICE] = np.select(
        [forward & ~is_first, backward & ~is_last], [positions[F_CODE][stage, before], backwards[stage, after]], -1
    )
    table[:, OWN] = np.select([backward, weight], [positions[F_CODE][stage, unit], positions[I_CODE][stage, unit]], -1)
    return table
