"""This engine beside torch.distributed.pipelining: the same modules, ranks and microbatches, raced in the same processes.

First whole microbatches, family by family. Then one microbatch: what slices add to an unsliced GPipe.
Steps alternate in shuffled rounds; ratios are medians of pairs, and each contender also races a copy
of itself (A/A), which shows the noise. Slices are measured between rounds; the simulator knows only them.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import contenders
import numpy as np
import pandas as pd
from tqdm.auto import tqdm

import terapipe as tp
from terapipe.engine.control import ENVIRONMENT
from terapipe.engine.launch import Ranks
from terapipe.engine.probe import PROBE
from terapipe.engine.results import prepare
from terapipe.experiment import Predictor, paired_speedup
from terapipe.experiment.predictions import splits_backward
from terapipe.profiling import measure, plan_probe, read_probe

N_RANKS, N_WARMUP_ROUNDS, ROUNDS_PER_PROBE, N_REPEATS = 2, 2, 3, 4
SEQ_TOKENS, N_MICROBATCHES, N_ROUNDS = 256, 8, 21
SLICED_SEQ_TOKENS, GRANULARITY_TOKENS, N_SLICED_ROUNDS = 1024, 16, 15
CHUNKS_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2}
MODEL = tp.ModelConfig.preset("tour")


class PeerRanks(Ranks):
    """Ranks that can also race: processes of this benchmark's own in place of the engine's."""

    def _start(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        context = multiprocessing.get_context("spawn")
        lines = [self.switchboard.environment(rank)[ENVIRONMENT] for rank in range(self.n_ranks)]
        self.processes = [
            context.Process(target=contenders.serve, args=(rank, self.n_ranks, self.store.port, line), daemon=True)
            for rank, line in enumerate(lines)
        ]
        for process in self.processes:
            process.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.switchboard.send({"do": "stop"})
            for process in self.processes:
                process.join(timeout=10)
        self._kill()

    def _kill(self) -> None:
        self.switchboard.close()  # ends ranks that listen
        for process in getattr(self, "processes", []):
            process.kill()
            process.join()


@dataclass(frozen=True)
class Raced:
    """Rounds of some contenders: (round, contender) milliseconds, of the step, and of all ranks' CPUs and compute actions.

    And how far their gradients are from the first contender's.
    """

    step_ms: np.ndarray
    cpu_ms: np.ndarray
    busy_ms: np.ndarray
    errors: list[float]

    def ratio(self, this: Sequence[int], other: Sequence[int], what: str = "step_ms") -> tuple[float, float, float]:
        """Median over rounds of one contender's time ÷ another's, and its 95 % interval; of copies, their geometric mean."""
        this_ms, other_ms = (np.exp(np.log(getattr(self, what)[:, list(copies)]).mean(axis=1)) for copies in (this, other))
        return paired_speedup(this_ms, other_ms)


def race(ranks: Ranks, sides: Sequence[tuple[str, tp.RunSpec]], n_rounds: int, probe: dict[str, Any], scratch: Path) -> Raced:
    """Race (whose, spec) pairs in shuffled rounds; the slices of `probe` are measured between them."""
    directories = [prepare(spec, scratch / f"{index}-{whose}") for index, (whose, spec) in enumerate(sides)]
    shuffle = np.random.default_rng(0)
    order: list[int] = []
    for index in range(N_WARMUP_ROUNDS + n_rounds):
        order += shuffle.permutation(len(sides)).tolist()
        if index % ROUNDS_PER_PROBE == 0:
            order.append(PROBE)
    named = [(whose, str(directory)) for (whose, _), directory in zip(sides, directories, strict=True)]
    with tqdm(total=len(order), unit="step", leave=False, desc=sides[0][1].schedule_name) as bar:
        results = ranks.do({"do": "race", "contenders": named, "order": order, "probe": probe}, lambda _: bar.update())
    times = np.array([result["times"] for result in results]) / 1e6  # (rank, contender, round, what)
    step, cpu, busy = np.moveaxis(times[:, :, N_WARMUP_ROUNDS:], 3, 0)
    return Raced(step.max(axis=0).T, cpu.sum(axis=0).T, busy.sum(axis=0).T, results[0]["errors"])


def unsliced(ranks: Ranks, family: str, scratch: Path) -> dict[str, str]:
    """One family, whole microbatches: a column of the table."""
    slicing = tp.uniform_slicing(SEQ_TOKENS, 1, n_microbatches=N_MICROBATCHES)
    spec = tp.RunSpec(MODEL, slicing, family, n_ranks=N_RANKS, chunks_per_rank=CHUNKS_PER_RANK[family])
    points, splits = [(SEQ_TOKENS, 0, 1)], splits_backward([spec])
    before = measure(ranks, spec, points, N_REPEATS, scratch, splits)
    probe = plan_probe(spec, points, scratch, splits)
    raced = race(ranks, [("theirs", spec), ("ours", spec), ("theirs", spec), ("ours", spec)], N_ROUNDS, probe, scratch)
    profile = before.joined(read_probe(probe, spec))
    costs = [profile.table(stage) for stage in range(spec.n_stages)]
    simulated_ms = tp.simulate(spec.schedules[0], costs, contention=profile.contention).makespan_ms
    theirs_ms, ours_ms, *_ = np.median(raced.step_ms, axis=0)
    return {
        "family": family,
        "its schedule in torch": contenders.PEERS[family].__name__.removeprefix("Schedule"),
        "step here [ms], measured": f"{ours_ms:.1f}",
        "step in torch [ms], measured": f"{theirs_ms:.1f}",
        "step, here ÷ torch": show(raced.ratio((1, 3), (0, 2))),
        "CPU time, here ÷ torch": show(raced.ratio((1, 3), (0, 2), "cpu_ms")),
        "A/A here": show(raced.ratio((1,), (3,))),
        "A/A torch": show(raced.ratio((0,), (2,))),
        "step [ms], simulated": f"{simulated_ms:.1f}",
        "contention, measured": f"{profile.contention_raw:.3f}",
        "step here, measured ÷ simulated": f"{ours_ms / simulated_ms:.3f}",
        "gradients, largest difference": f"{max(raced.errors):.1e}",
    }


def show(ratio: tuple[float, float, float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*ratio)


def sliced(ranks: Ranks, scratch: Path) -> None:
    """One microbatch: torch's GPipe, GPipe here, and terapipe here with the slicing DP's slices."""
    whole = tp.RunSpec(MODEL, tp.uniform_slicing(SLICED_SEQ_TOKENS, 1), "gpipe", n_ranks=N_RANKS)
    predictor = Predictor(ranks, whole, scratch)
    cost = predictor.before.fit()
    plan = tp.optimal_slicing(
        cost, SLICED_SEQ_TOKENS, N_RANKS, granularity_tokens=GRANULARITY_TOKENS, min_slice_tokens=cost.slice_tokens[0]
    )
    cut = whole.replaced(slicing=plan.slicing, schedule="terapipe")
    sides = [("theirs", whole), ("ours", whole), ("ours", cut), ("theirs", whole), ("ours", cut)]
    raced = race(ranks, sides, N_SLICED_ROUNDS, predictor.probe, scratch)
    print(f"\nOne microbatch of {SLICED_SEQ_TOKENS} tokens, {N_RANKS} ranks, {N_SLICED_ROUNDS} rounds: {plan.slicing}")
    report_sliced(raced, predictor, (whole, whole, cut))


def report_sliced(raced: Raced, predictor: Predictor, specs: Sequence[tp.RunSpec]) -> None:
    """Print what slices add, beside what they should: specs of torch's GPipe, GPipe here and terapipe here."""
    contention, k = predictor.profile.contention, specs[2].slicings[0].microbatches[0].n_slices
    simulated_ms, free_ms = ([predictor.timeline(spec, each).makespan_ms for spec in specs] for each in (contention, 1.0))
    table = pd.DataFrame(
        {
            "step [ms]": ["torch's GPipe", "gpipe here", "terapipe here"],
            "measured": np.median(raced.step_ms, axis=0)[:3].round(1),
            "simulated": np.round(simulated_ms, 1),
            "simulated without contention": np.round(free_ms, 1),
            "gradients, largest difference": [f"{error:.1e}" for error in raced.errors[:3]],
        }
    )
    print(table.to_string(index=False))
    ideal = simulated_ms[0] / simulated_ms[2]
    for name, copies in (("torch's GPipe", (0, 3)), ("gpipe here", (1,))):
        speedup = raced.ratio(copies, (2, 4))
        print(f"speed-up of terapipe over {name}, measured: {show(speedup)}; ÷ simulated {speedup[0] / ideal:.3f}")
    print(
        f"the same, simulated: {ideal:.3f} with the measured contention of {predictor.profile.contention_raw:.3f}, "
        f"{free_ms[0] / free_ms[2]:.3f} without\n"
        f"ideal with contention, {k} equal slices that cost nothing extra, 2k ÷ (2 + (k−1)c): "
        f"{2 * k / (2 + (k - 1) * contention):.3f}\n"
        f"compute here, sliced ÷ whole, measured: {show(raced.ratio((2, 4), (1,), 'busy_ms'))}\n"
        f"A/A torch {show(raced.ratio((0,), (3,)))}, terapipe {show(raced.ratio((2,), (4,)))}"
    )


def main() -> None:
    parts = sys.argv[1:] or [*CHUNKS_PER_RANK, "sliced"]
    unknown = sorted({*parts} - {*CHUNKS_PER_RANK, "sliced"})
    if unknown:
        sys.exit(f"unknown part(s) {unknown}; allowed are {[*CHUNKS_PER_RANK, 'sliced']}, all by default.")
    with tempfile.TemporaryDirectory() as root, PeerRanks(N_RANKS, Path(root)) as ranks:
        columns = [unsliced(ranks, family, Path(root) / family) for family in CHUNKS_PER_RANK if family in parts]
        if columns:
            print(
                f"{N_MICROBATCHES} whole microbatches of {SEQ_TOKENS} tokens, {N_RANKS} ranks, {N_ROUNDS} rounds; "
                "medians, ratios of pairs with their 95 % interval"
            )
            print(pd.DataFrame(columns).set_index("family").T.to_string())
        if "sliced" in parts:
            sliced(ranks, Path(root) / "sliced")


if __name__ == "__main__":
    main()
