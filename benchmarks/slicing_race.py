"""The slicing DP's slices raced against equal ones, and every step time beside its prediction.

On 8 emulated ranks, whose slices cost what a long causal sequence would; and on two CPU ranks, whose
slices cost what was measured just before. The rival is the fastest of the equal slicings in the first
half of the rounds; it is compared in the second half, so that no lucky round chooses it.
"""

import sys
import tempfile
from pathlib import Path

import pandas as pd

import terapipe as tp
from terapipe.engine.launch import Ranks, prepare_all
from terapipe.experiment import RaceResult, prepare_race, run_race
from terapipe.profiling import measure, plan_points, plan_probe, read_probe

N_SLICES = (1, 2, 4, 8, 16)
N_EMULATED_RANKS, N_EMULATED_ROUNDS = 8, 12
N_RANKS, N_ROUNDS, N_REPEATS, ROUNDS_PER_PROBE = 2, 16, 5, 4


def long_sequence_cost() -> tp.CallableCost:
    """8,192 tokens cut as 65,536 at width 6,144 would be: half of the FLOPs are attention's; 6 ms a slice of overhead."""

    def forward_ms(l, c, b):
        return b * (6 + 0.012 * l + 0.012 * l * 2 * (c + l / 2) / 8192)

    return tp.CallableCost(forward_ms, lambda l, c, b: 2 * forward_ms(l, c, b))


def show(result: RaceResult, names: list[str], predicted_ms: list[float]) -> None:
    """The race's table with predictions, and the verdict against the best equal slicing."""
    table = pd.DataFrame(
        {
            "slicing": names,
            "raced [ms]": result.table["step_ms"].iloc[:-1].to_numpy(),
            "predicted [ms]": predicted_ms,
        }
    )
    table["predicted ÷ raced"] = table["predicted [ms]"] / table["raced [ms]"]
    print(table.round(3).to_string(index=False))
    found = result.against_best(0)
    print(
        f"The slicing DP against {names[found.rival]}: speed-up {found.speedup:.3f} [{found.low:.3f}, {found.high:.3f}], "
        f"{found.verdict}; the simulator says {predicted_ms[found.rival] / predicted_ms[0]:.3f}; "
        f"A/A ±{result.aa_half_width:.3f}",
        flush=True,
    )


def emulated() -> None:
    cost, seq_tokens = long_sequence_cost(), 8192
    plan = tp.optimal_slicing(cost, seq_tokens, N_EMULATED_RANKS, granularity_tokens=32)
    slicings = [plan.slicing, *(tp.uniform_slicing(seq_tokens, n) for n in N_SLICES)]
    model = tp.ModelConfig(N_EMULATED_RANKS, 16, 2, max_seq_tokens=seq_tokens)
    specs = [
        tp.RunSpec(model, slicing, n_ranks=N_EMULATED_RANKS, device="emulated", cost=cost, n_warmup_steps=1)
        for slicing in slicings
    ]
    predicted = [tp.simulate(spec.schedules[0], cost).makespan_ms for spec in specs]
    print(f"\n{N_EMULATED_RANKS} EMULATED ranks (their slices sleep; the runtime and the order are real): {plan.slicing}")
    show(tp.race(specs, N_EMULATED_ROUNDS), names_of(slicings), predicted)


def names_of(slicings: list[tp.Slicing]) -> list[str]:
    return ["slicing DP", *(f"{each.microbatches[0].n_slices} equal" for each in slicings[1:])]


def on_this_machine(scratch: Path, seq_tokens: int = 1024) -> None:
    model = tp.ModelConfig.preset("tour")
    whole = tp.RunSpec(model, tp.uniform_slicing(seq_tokens, 1), n_ranks=N_RANKS)
    points = plan_points(seq_tokens)
    with Ranks(N_RANKS, scratch) as ranks:
        before = measure(ranks, whole, points, N_REPEATS, scratch)
        cost = before.fit()
        shortest = cost.slice_tokens[0]
        plan = tp.optimal_slicing(cost, seq_tokens, N_RANKS, granularity_tokens=16, min_slice_tokens=shortest)
        slicings = [plan.slicing, *(tp.uniform_slicing(seq_tokens, n) for n in N_SLICES)]
        prepared = prepare_race([whole.replaced(slicing=slicing) for slicing in slicings], N_ROUNDS)
        placed = [spec.replaced(directory=scratch / f"run-{index}") for index, spec in enumerate(prepared)]
        probe = plan_probe(whole, points, scratch) | {"together": []}
        result = run_race(ranks, placed, prepare_all(placed), probe=probe, rounds_per_probe=ROUNDS_PER_PROBE)
    costs = [before.joined(read_probe(probe, whole)).fit(stage) for stage in range(N_RANKS)]
    predicted = [
        tp.simulate(spec.schedules[0], costs, contention=before.contention).makespan_ms for spec in placed[: len(slicings)]
    ]
    print(f"\n{N_RANKS} CPU ranks, measured; contention {before.contention_raw:.3f} measured before: {plan.slicing}")
    show(result, names_of(slicings), predicted)
    print(before.held_out_error().round(3).to_string(index=False))


def main() -> None:
    parts = sys.argv[1:] or ["emulated", "cpu"]
    if "emulated" in parts:
        emulated()
    if "cpu" in parts:
        with tempfile.TemporaryDirectory() as scratch:
            on_this_machine(Path(scratch))


if __name__ == "__main__":
    main()
