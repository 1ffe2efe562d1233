"""The slicing DP's slices raced against equal ones, and every step time beside its prediction.

On 8 emulated ranks, whose slices cost what a long causal sequence would; and on two CPU ranks, whose
slices cost what was measured just before. The rival is the fastest of the equal slicings in the first
half of the rounds; it is compared in the second half, so that no lucky round chooses it.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import terapipe as tp
from terapipe.engine.launch import Ranks, prepare_all
from terapipe.experiment import Predictor, RaceResult, prepare_race, run_race

N_SLICES = (1, 2, 4, 8, 16)
N_EMULATED_RANKS, N_EMULATED_ROUNDS = 8, 12
N_RANKS, N_ROUNDS, ROUNDS_PER_PROBE = 2, 16, 2


def long_sequence_cost() -> tp.CallableCost:
    """8,192 tokens cut as 65,536 at width 6,144 would be: half of the FLOPs are attention's; 6 ms a slice of overhead."""

    def forward_ms(l, c, b):
        return b * (6 + 0.012 * l + 0.012 * l * 2 * (c + l / 2) / 8192)

    return tp.CallableCost(forward_ms, lambda l, c, b: 2 * forward_ms(l, c, b))


def show(result: RaceResult, slicings: list[tp.Slicing]) -> None:
    """The race's table with predictions, and the verdict against the best equal slicing."""
    names = ["slicing DP", *(f"{each.microbatches[0].n_slices} equal" for each in slicings[1:]), "slicing DP again"]
    table = result.table.assign(slicing=names)
    table["predicted ÷ raced"] = table["predicted_ms"] / table["step_ms"]
    print(table[["slicing", "step_ms", "predicted_ms", "predicted ÷ raced"]].round(3).to_string(index=False))
    found, predicted = result.against_best(0), result.table["predicted_ms"]
    print(
        f"The slicing DP against {names[found.rival]}: speed-up {found.speedup:.3f} "
        f"[{found.speedup_low:.3f}, {found.speedup_high:.3f}], {found.verdict}; "
        f"the simulator says {predicted[found.rival] / predicted[0]:.3f}; A/A ±{result.aa_half_width:.3f}",
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
    print(f"\n{N_EMULATED_RANKS} EMULATED ranks (their slices sleep; the runtime and the order are real): {plan.slicing}")
    show(tp.race(specs, N_EMULATED_ROUNDS), slicings)


def on_this_machine(scratch: Path, seq_tokens: int = 1024) -> None:
    model = tp.ModelConfig.preset("tour")
    whole = tp.RunSpec(model, tp.uniform_slicing(seq_tokens, 1), n_ranks=N_RANKS)
    with Ranks(N_RANKS, scratch) as ranks:
        predictor = Predictor(ranks, whole, scratch)
        cost = predictor.before.fit()
        shortest = cost.slice_tokens[0]
        plan = tp.optimal_slicing(cost, seq_tokens, N_RANKS, granularity_tokens=16, min_slice_tokens=shortest)
        slicings = [plan.slicing, *(tp.uniform_slicing(seq_tokens, n) for n in N_SLICES)]
        prepared = prepare_race([whole.replaced(slicing=slicing) for slicing in slicings], N_ROUNDS)
        placed = [spec.replaced(directory=scratch / f"run-{index}") for index, spec in enumerate(prepared)]
        result = run_race(ranks, placed, prepare_all(placed), probes=[predictor.probe], rounds_per_probe=ROUNDS_PER_PROBE)
        result = replace(result, predicted=[predictor.timeline(spec) for spec in placed[:-1]])
        contention = [round(profile.contention_raw, 3) for profile in (predictor.before, predictor.profile)]
        print(f"\n{N_RANKS} CPU ranks, measured; contention {contention} (before the race, all in all): {plan.slicing}")
        show(result, slicings)
        print(predictor.profile.report().round(3).to_string())


def main() -> None:
    parts = sys.argv[1:] or ["emulated", "cpu"]
    if "emulated" in parts:
        emulated()
    if "cpu" in parts:
        with tempfile.TemporaryDirectory() as scratch:
            on_this_machine(Path(scratch))


if __name__ == "__main__":
    main()
