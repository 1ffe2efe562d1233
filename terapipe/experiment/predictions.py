"""What the steps of a race should take: slices measured on the ranks that race, then simulated.

Slices are measured alone, and for contention with all ranks at once, before the race and between its
rounds: a machine whose speed wanders, or whose cores get in each other's way at times, then slows
costs and race alike. Nothing is fitted to the steps that it predicts.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from terapipe.cost import CostModel, LinearContextCost, Profile
from terapipe.errors import SpecError
from terapipe.schedule import Kind
from terapipe.simulator import simulate
from terapipe.spec import RunSpec
from terapipe.timeline import Timeline

if TYPE_CHECKING:
    from terapipe.engine.launch import Ranks

N_REPEATS = 5  # before a race
_SHARED = ("model", "dtype", "stage")
LayerCut = tuple[tuple[int, int], ...]  # first and last + 1 layer of every stage


class Predictor:
    """The measured slices of one model on ranks that are running, and the steps that they predict.

    Parameters
    ----------
    ranks : Ranks
        Those of the race.
    spec : RunSpec
        Of any of its runs: names model and stages.
    scratch : Path
        Folder for the rows.
    n_repeats : int
        Of each point before the race.
    shortest_tokens : int, optional
        Shortest slice to predict, if it is below 1/16 of the sequence.
    split_backward : bool
        Whether a raced schedule splits a backward: its halves, I and W, are then measured too.

    Attributes
    ----------
    before : Profile
        Measured before the race: what a slicing can be planned with.
    probe : dict
        For `run_race`: what to measure between rounds.
    """

    def __init__(
        self,
        ranks: "Ranks",
        spec: RunSpec,
        scratch: Path,
        n_repeats: int = N_REPEATS,
        shortest_tokens: int | None = None,
        split_backward: bool = False,
    ) -> None:
        from terapipe.profiling import measure, plan_points, plan_probe

        first = spec.slicings[0]
        points = plan_points(first.seq_tokens, n_sequences=first.microbatches[0].n_sequences, shortest_tokens=shortest_tokens)
        self.spec = spec
        self.before = measure(ranks, spec, points, n_repeats, scratch, split_backward)
        self.probe = plan_probe(spec, points, scratch, split_backward)

    @cached_property
    def profile(self) -> Profile:
        """All that was measured, once the race is over."""
        from terapipe.profiling import read_probe

        return self.before.joined(read_probe(self.probe, self.spec))

    @cached_property
    def costs(self) -> list[LinearContextCost]:
        """Eq. (9) fitted to each stage."""
        return [self.profile.fit(stage) for stage in range(self.spec.n_stages)]

    def timeline(self, spec: RunSpec, contention: float | None = None) -> Timeline:
        """The simulated steps of a spec; by default with the contention of all that was measured."""
        return simulate_steps(spec, self.costs, self.profile.contention if contention is None else contention)


def simulate_steps(spec: RunSpec, costs: Sequence[CostModel], contention: float = 1.0) -> Timeline:
    """A step for each slicing that a spec's steps cycle through; one cost a stage."""
    link, size = spec.link, spec.bytes_per_token
    steps = [simulate(schedule, costs, link, size, contention) for schedule in spec.schedules]
    frame = pd.concat([each.frame.assign(step=step) for step, each in enumerate(steps)], ignore_index=True)
    return Timeline(frame, alone_ms=np.concatenate([each.alone_ms for each in steps]), cost=costs)


def shortest_tokens(specs: Sequence[RunSpec]) -> int:
    """The shortest slice of any spec."""
    return int(min(slicing.units[:, 2].min() for spec in specs for slicing in spec.slicings))


def splits_backward(specs: Sequence[RunSpec]) -> bool:
    """Whether the schedule of any spec runs a backward in two halves."""
    return any(Kind.W in schedule.kinds for spec in specs for schedule in spec.schedules)


def layer_cut(spec: RunSpec) -> LayerCut:
    """How the layers are cut into stages: specs that cut alike share their slices' times."""
    return tuple((layers.start, layers.stop) for layers in spec.layer_ranges)


def by_layers(specs: Sequence[RunSpec]) -> dict[LayerCut, list[RunSpec]]:
    """The specs by their cut into stages."""
    found: dict[LayerCut, list[RunSpec]] = {}
    for spec in specs:
        found.setdefault(layer_cut(spec), []).append(spec)
    return found


def check_predictable(specs: Sequence[RunSpec]) -> None:
    """Refuse specs whose steps the slices of one model and one size cannot predict."""
    for index, spec in enumerate(specs):
        for name in _SHARED:
            if getattr(spec, name) != getattr(specs[0], name):
                raise SpecError(
                    f"predict=True: spec {index} has another {name} than spec 0; slices of one model are measured. "
                    "Race alike, or leave predict out."
                )
    sizes = {
        (slicing.seq_tokens, each.n_sequences) for spec in specs for slicing in spec.slicings for each in slicing.microbatches
    }
    if len(sizes) > 1:
        raise SpecError(
            f"predict=True: microbatches of (seq_tokens, n_sequences) {sorted(sizes)}; one profile predicts one size. "
            "Race specs of one size, or leave predict out."
        )
