"""Races: comparisons that may be published, with an interval, beside their own noise.

Two configurations run in one launch, a step of each in shuffled rounds, together with a second copy
of the first. Each round gives one paired ratio; the copy's ratio, whose truth is 1, shows the noise.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.cost import Profile
from terapipe.errors import SpecError, check_integer
from terapipe.experiment.predictions import (
    Predictor,
    by_layers,
    check_predictable,
    layer_cut,
    shortest_tokens,
    simulate_steps,
    splits_backward,
)
from terapipe.spec import RunSpec
from terapipe.timeline import Timeline

if TYPE_CHECKING:
    # The engine is imported where it starts processes: sweeps of simulations work without torch.
    from terapipe.engine.launch import Ranks
    from terapipe.engine.results import Run

N_RESAMPLES = 10_000
ROUNDS_PER_PROBE = 2  # of a race that predicts: seldom measured, slices and steps see different machines
AGAIN = "again"  # name of the second copy of the first spec


class AgainstBest(NamedTuple):
    """A spec against the best of the others: speed-up of the one over the other, with its 95 % interval."""

    rival: int
    speedup: float
    speedup_low: float
    speedup_high: float
    n_rounds: int
    verdict: str


@dataclass(frozen=True, eq=False)
class RaceResult:
    """What a race measured.

    Attributes
    ----------
    runs : list of Run
        One for each spec.
    again : Run
        The second copy of the first spec: the A/A pair.
    predicted : list of Timeline, or None
        The simulated step of each spec; None where slices were not measured (`predict=False`).
    profile : Profile, or None
        The slices measured before the race and between its rounds, of spec 0's stages. Specs that cut the
        layers otherwise were predicted with a profile of their own stages.
    """

    runs: "list[Run]"
    again: "Run"
    predicted: list[Timeline] | None = None
    profile: Profile | None = None

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """Step time in ms, one row a round, one column a spec, and "again" for the copy of spec 0."""
        names: list[int | str] = [*range(len(self.runs)), AGAIN]
        steps = [run.timeline.steps["makespan_ms"] for run in [*self.runs, self.again]]
        return pd.concat(steps, axis=1, keys=names).rename_axis("round")

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a spec: median step time, predicted one, and speed-up over spec 0 with its 95 % interval."""
        base = self.rounds[0].to_numpy(dtype=np.float64)
        predicted: dict[Hashable, float] = dict(enumerate(each.makespan_ms for each in self.predicted or []))
        predicted[AGAIN] = predicted.get(0, np.nan)
        rows = []
        for name, times in self.rounds.items():
            speedup, low, high = paired_speedup(base, times.to_numpy(dtype=np.float64))
            verdict = "the same" if name == 0 else _verdict(low, high)
            rows.append((name, float(times.median()), predicted.get(name, np.nan), speedup, low, high, len(times), verdict))
        columns = ["spec", "step_ms", "predicted_ms", "speedup", "speedup_low", "speedup_high", "n_rounds", "verdict"]
        return pd.DataFrame(rows, columns=columns).set_index("spec")

    @property
    def aa_half_width(self) -> float:
        """Half the 95 % interval of the A/A pair's ratio: differences below it are noise."""
        intervals = self.table[["speedup_low", "speedup_high"]].to_numpy(dtype=np.float64)
        return float(intervals[-1, 1] - intervals[-1, 0]) / 2

    def against_best(self, index: int) -> AgainstBest:
        """Compare a spec with the fastest of the others, chosen on other rounds than it is compared on.

        The rival has the least median over the first half of the rounds; the paired speed-up of spec
        `index` over it is of the second half. A rival chosen on the rounds it is judged by would look
        faster than it is: the best of several noisy medians is biased.

        Raises
        ------
        SpecError
            Without another spec, or with fewer than four rounds.
        """
        n_specs, n_rounds = len(self.rounds.columns) - 1, len(self.rounds)
        if check_integer("index", index, 0, SpecError) >= n_specs:
            raise SpecError(f"index={index}: the race has the specs 0…{n_specs - 1}.")
        if n_specs < 2:
            raise SpecError("a race of one spec has no best of the others. Race it with at least one more.")
        if n_rounds < 4:
            raise SpecError(f"{n_rounds} rounds cannot be halved: one half chooses, the other compares. Race at least 4.")
        times = self.rounds.to_numpy(dtype=np.float64)
        first, second = times[: n_rounds // 2], times[n_rounds // 2 :]
        medians = np.median(first[:, :n_specs], axis=0)
        medians[index] = np.inf
        rival = int(medians.argmin())
        speedup, low, high = paired_speedup(second[:, rival], second[:, index])
        return AgainstBest(rival, speedup, low, high, len(second), _verdict(low, high))


def paired_speedup(base_ms: npt.NDArray[np.float64], other_ms: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Median of base ÷ other over rounds, with a bootstrap 95 % interval over rounds."""
    ratios = np.log(base_ms) - np.log(other_ms)
    resampled = np.random.default_rng(0).choice(ratios, size=(N_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return float(np.exp(np.median(ratios))), float(np.exp(low)), float(np.exp(high))


def _verdict(low: float, high: float) -> str:
    if low <= 1 <= high:
        return "not distinguishable"
    return "faster" if low > 1 else "slower"


def race(specs: Sequence[RunSpec], n_rounds: int = 12, seed: int = 0, predict: bool = False) -> RaceResult:
    """Compare specs, the first being the base, in alternating shuffled rounds of one launch.

    Parameters
    ----------
    specs : list of RunSpec
        At least one; all with the same ranks and device, as many tokens in each round, and all training or
        none. Their `n_steps` becomes `n_rounds`.
    n_rounds : int
        Measured rounds, after each spec's warm-up steps.
    seed : int
        Of the order within rounds.
    predict : bool
        Also measure slices, before the race and between its rounds, and simulate every spec with
        them: the table's predicted_ms. Takes a model, and microbatches, that all specs share.
        Emulated specs are always predicted: their costs are known.

    Raises
    ------
    SpecError
        For specs that cannot be paired, or not be predicted.
    """
    from terapipe.engine.launch import Ranks, launch_directory, prepare_all

    prepared = prepare_race(specs, n_rounds)
    emulated = prepared[0].device == "emulated"
    if predict and not emulated:
        check_predictable(prepared)
    directories = prepare_all(prepared)
    home = launch_directory(directories)
    with Ranks(prepared[0].n_ranks, home) as ranks:
        if emulated or not predict:
            result = run_race(ranks, prepared, directories, seed)
            predicted = [simulate_steps(spec, spec.stage_costs) for spec in specs] if emulated else None
            return replace(result, predicted=predicted)
        shortest = shortest_tokens(specs)
        predictors = {
            cut: Predictor(ranks, alike[0], home, shortest_tokens=shortest, split_backward=splits_backward(alike))
            for cut, alike in by_layers(prepared).items()
        }
        result = run_race(ranks, prepared, directories, seed, [each.probe for each in predictors.values()], ROUNDS_PER_PROBE)
    predicted = [predictors[layer_cut(spec)].timeline(spec) for spec in specs]
    return replace(result, predicted=predicted, profile=predictors[layer_cut(specs[0])].profile)


def prepare_race(specs: Sequence[RunSpec], n_rounds: int) -> list[RunSpec]:
    """The specs of a race, with the copy of the first at the end; refuses what cannot be paired."""
    check_integer("n_rounds", n_rounds, 2, SpecError)
    if not specs:
        raise SpecError("a race needs at least one spec.")
    for index, spec in enumerate(specs):
        for name in ("n_ranks", "device", "n_warmup_steps"):
            if getattr(spec, name) != getattr(specs[0], name):
                raise SpecError(
                    f"spec {index} has {name}={getattr(spec, name)!r}, spec 0 has {getattr(specs[0], name)!r}; "
                    "specs that race share them, as their steps alternate in one launch."
                )
        _check_same_work(index, spec, specs[0], n_rounds)
        if spec.measure_memory:
            raise SpecError(f"spec {index} has measure_memory=True, which takes time of its own. Race without it.")
        if spec.directory is not None:
            raise SpecError(f"spec {index} has directory={str(spec.directory)!r}; a race makes its own.")
    return [spec.replaced(n_steps=n_rounds) for spec in [*specs, specs[0]]]


def _check_same_work(index: int, spec: RunSpec, base: RunSpec, n_rounds: int) -> None:
    """Steps whose times are divided train as much, or evaluate as much."""
    if spec.trains != base.trains:
        does = ["runs forwards alone (its schedule has no backward)", "trains"]
        raise SpecError(
            f"spec {index} {does[spec.trains]}, spec 0 {does[base.trains]}; the table compares step times: race specs that "
            "all train, or that all run forwards alone."
        )
    pairs = zip(_tokens_of_rounds(spec, n_rounds), _tokens_of_rounds(base, n_rounds), strict=True)
    for round_index, (tokens, of_base) in enumerate(pairs):
        if tokens != of_base:
            raise SpecError(
                f"spec {index} runs {tokens} tokens in round {round_index}, spec 0 {of_base}; the table compares step times: "
                "race specs of as many tokens a step."
            )


def _tokens_of_rounds(spec: RunSpec, n_rounds: int) -> list[int]:
    return [spec.slicings[spec.slicing_index(step)].n_tokens for step in range(n_rounds)]


def run_race(
    ranks: "Ranks",
    prepared: Sequence[RunSpec],
    directories: Sequence[Path],
    seed: int = 0,
    probes: Sequence[dict[str, Any]] = (),
    rounds_per_probe: int = 4,
) -> RaceResult:
    """Race prepared specs on ranks that are already running.

    With `probes` (see `profiling.plan_probe`), their points are measured once after every
    `rounds_per_probe` rounds: on a machine whose speed wanders, costs and race then see the same.
    """
    from terapipe.engine.probe import PROBE

    shuffle = np.random.default_rng(seed)
    order: list[int] = []
    for round_index in range(1, prepared[0].n_warmup_steps + prepared[0].n_steps + 1):
        order += shuffle.permutation(len(prepared)).tolist()
        if probes and round_index % rounds_per_probe == 0:
            order.append(PROBE)
    *runs, again = ranks.train(directories, order, probes=probes)
    return RaceResult(runs, again)
