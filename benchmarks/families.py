"""Every family that runs, on two real ranks: the raced step beside what the simulator says of it.

Slices are measured alone, and with both ranks at once for contention, before the race and between its
rounds, of one and of two stages a rank; nothing is fitted to the steps. Printed: measured ÷ simulated for
each (family, slicing), and the rank correlation of the two.
"""

import sys

import pandas as pd

import terapipe as tp

MODEL = tp.ModelConfig(n_layers=4, d_model=256, n_heads=8, max_seq_tokens=1024)
N_MICROBATCHES, N_ROUNDS = 2, 15
CUTS = {
    "whole": "[1024]",
    "2 equal": "[512, 512]",
    "4 equal": "[256] * 4",
    "3 unequal": "[448, 320, 256]",
    "2 unequal": "[640, 384]",
}
PAIRS = [
    *((family, "whole") for family in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")),
    *(("terapipe", cut) for cut in ("2 equal", "4 equal", "3 unequal", "2 unequal")),
    *(("seq1f1b", cut) for cut in ("2 equal", "4 equal", "3 unequal")),
    *(("seq1f1b-zb", cut) for cut in ("2 equal", "4 equal", "3 unequal")),
    *(("seq1f1b-interleaved", "2 equal"), ("slimpipe", "4 equal"), ("svpp", "4 equal")),
]


def build(family: str, cut: str) -> tp.RunSpec:
    options = {"max_in_flight": 4} if family == "svpp" else {}
    schedule = tp.build_schedule(family, 2, f"[(1, {CUTS[cut]})] * {N_MICROBATCHES}", **options)
    return tp.RunSpec(MODEL, schedule.slicing, schedule=schedule, n_ranks=2, n_warmup_steps=2)


def main(n_rounds: int = N_ROUNDS) -> None:
    result = tp.race([build(*pair) for pair in PAIRS], n_rounds=n_rounds, predict=True)
    raced = result.table.loc[list(range(len(PAIRS)))]
    table = pd.DataFrame(PAIRS, columns=["family", "slicing"]).assign(
        measured_ms=raced["step_ms"].to_numpy(), simulated_ms=raced["predicted_ms"].to_numpy()
    )
    table["measured / simulated"] = table["measured_ms"] / table["simulated_ms"]
    print(table.round(3).to_string(index=False))
    assert result.profile is not None
    far = (table["measured / simulated"] - 1).abs().max()
    correlation = table["measured_ms"].corr(table["simulated_ms"], method="spearman")
    noise = result.aa_half_width
    print(f"contention {result.profile.contention:.3f}, A/A ±{noise:.3f}, {n_rounds} rounds, M = {N_MICROBATCHES}")
    print(f"farthest from the simulator {far:.3f}; rank correlation {correlation:.3f} over {len(PAIRS)} pairs")
    right, n_far = ordered_alike(table, noise)
    print(
        f"of {n_far} pairs of schedules whose simulated steps differ by more than the noise, {right} are measured in that order"
    )


def ordered_alike(table: pd.DataFrame, noise: float) -> tuple[int, int]:
    """Pairs of rows whose simulated steps differ by more than the noise: measured in the same order, and all."""
    both = table.merge(table, how="cross", suffixes=("", "_other"))
    far = both[both["simulated_ms"] > both["simulated_ms_other"] * (1 + noise)]
    return int((far["measured_ms"] > far["measured_ms_other"]).sum()), len(far)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
