"""Every family that runs, and many slicings, on two real ranks: raced steps beside what the simulator says.

Slices are measured alone, and with both ranks at once for contention, before the race and between its
rounds, of one and of two stages a rank; nothing is fitted to the steps. Printed: measured ÷ simulated for
each (family, slicing), and the rank correlation of the two. Two races: every family on two microbatches, where
steps differ little; and one microbatch, where slicing decides.
"""

import sys

import pandas as pd

import terapipe as tp

MODEL = tp.ModelConfig(n_layers=4, d_model=256, n_heads=8, max_seq_tokens=1024)
N_ROUNDS = 11
WHOLE, HALVES, QUARTERS = "[1024]", "[512, 512]", "[256] * 4"
FAMILIES = [
    *((family, WHOLE) for family in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")),
    *((family, "[448, 320, 256]") for family in ("terapipe", "seq1f1b", "seq1f1b-zb")),
    *(("seq1f1b-interleaved", HALVES), ("slimpipe", QUARTERS), ("svpp", QUARTERS)),
]
SLICINGS = [
    *(("gpipe", WHOLE), ("zb-h1", WHOLE), ("seq1f1b-zb", HALVES), ("seq1f1b-zb", QUARTERS), ("seq1f1b-interleaved", HALVES)),
    *(("terapipe", f"[{first}, {1024 - first}]") for first in (896, 832, 768, 704, 640, 512)),
    *(("terapipe", "[448, 320, 256]"), ("terapipe", QUARTERS), ("seq1f1b", "[320, 256, 240, 208]")),
]


def build(family: str, cut: str, n_microbatches: int) -> tp.RunSpec:
    options = {"max_in_flight": 4} if family == "svpp" else {}
    schedule = tp.build_schedule(family, 2, f"[(1, {cut})] * {n_microbatches}", **options)
    return tp.RunSpec(MODEL, schedule.slicing, schedule=schedule, n_ranks=2, n_warmup_steps=2)


def race(pairs: list[tuple[str, str]], n_microbatches: int, n_rounds: int) -> None:
    result = tp.race([build(*pair, n_microbatches) for pair in pairs], n_rounds=n_rounds, predict=True)
    raced = result.table.loc[list(range(len(pairs)))]
    table = pd.DataFrame(pairs, columns=["family", "slicing"]).assign(
        measured_ms=raced["step_ms"].to_numpy(), simulated_ms=raced["predicted_ms"].to_numpy()
    )
    table["measured / simulated"] = table["measured_ms"] / table["simulated_ms"]
    print(table.sort_values("simulated_ms").round(3).to_string(index=False))
    assert result.profile is not None
    noise = result.aa_half_width
    print(f"contention {result.profile.contention:.3f}, A/A ±{noise:.3f}, {n_rounds} rounds, M = {n_microbatches}")
    far = (table["measured / simulated"] - 1).abs().max()
    correlation = table["measured_ms"].corr(table["simulated_ms"], method="spearman")
    print(f"farthest from the simulator {far:.3f}; rank correlation {correlation:.3f} over {len(pairs)} pairs")
    right, n_far = ordered_alike(table, noise)
    print(f"of {n_far} couples whose simulated steps differ by more than the noise, {right} are measured in that order\n")


def main(n_rounds: int = N_ROUNDS) -> None:
    race(SLICINGS, 1, n_rounds)
    race(FAMILIES, 2, n_rounds)


def ordered_alike(table: pd.DataFrame, noise: float) -> tuple[int, int]:
    """Pairs of rows whose simulated steps differ by more than the noise: measured in the same order, and all."""
    both = table.merge(table, how="cross", suffixes=("", "_other"))
    far = both[both["simulated_ms"] > both["simulated_ms_other"] * (1 + noise)]
    return int((far["measured_ms"] > far["measured_ms_other"]).sum()), len(far)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
