"""A pipeline, as the families see it: ranks, stages on each, and units in forward and backward order. No costs.

A unit is one slice of one microbatch. The letters of the formulas: P ranks (r is one of them), v
stages on each, M microbatches, k the most slices of any microbatch, N units.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from terapipe.schedule.action import Action, Kind
from terapipe.slicing import Slicing

Order = list[Action]
Unit = tuple[int, int]  # (microbatch, slice)


@dataclass(frozen=True)
class Pipeline:
    """Ranks, stages a rank, and the slicing of the step that they run."""

    n_ranks: int
    slicing: Slicing
    chunks_per_rank: int = 1

    @cached_property
    def forwards(self) -> list[Unit]:
        """Units in forward order: microbatches and the slices of each ascending."""
        return [(int(microbatch), int(place)) for microbatch, place in self.slicing.units[:, :2]]

    @cached_property
    def backwards(self) -> list[Unit]:
        """Microbatches first in, first out; the slices of each last in, first out."""
        return sorted(self.forwards, key=lambda unit: (unit[0], -unit[1]))

    @property
    def n_units(self) -> int:
        """N."""
        return len(self.forwards)

    @property
    def n_microbatches(self) -> int:
        """M."""
        return self.slicing.n_microbatches

    @cached_property
    def n_slices(self) -> int:
        """k: the most slices of any microbatch, as the first backward needs all slices of microbatch 0."""
        return max(microbatch.n_slices for microbatch in self.slicing.microbatches)

    @cached_property
    def has_equal_counts(self) -> bool:
        """Whether every microbatch has as many slices as any other."""
        return self.n_units == self.n_microbatches * self.n_slices


def actions(stage: int, kind: Kind, units: Iterable[Unit]) -> Order:
    """One action of a stage for each unit."""
    return [Action(stage, kind, microbatch, place) for microbatch, place in units]
