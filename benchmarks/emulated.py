"""What the runtime costs: 8 emulated ranks beside the simulator, in one race.

Slices sleep for 10 ms and more, so that two cores carry 8 ranks at true concurrency. What an action takes was
put in: this tests order, messages and runtime, not costs. Excess is measured − simulated makespan, ÷ the
actions on the simulated critical path.
"""

import pandas as pd

import terapipe as tp

MODEL = tp.ModelConfig(n_layers=8, d_model=64, n_heads=2, max_seq_tokens=512)
COST = tp.CallableCost(
    lambda l, c, b: 0.1 * l * (1 + c / 1000), lambda l, c, b: 0.2 * l * (1 + c / 1000), weight_ms=lambda l, c, b: 0.1 * l
)
WHOLE, SLICED = "[(1, [512])] * 4", "[(1, [176, 132, 104, 100])] * 4"
CASES = {"terapipe": SLICED, "seq1f1b": SLICED, "seq1f1b-zb": SLICED, "1f1b": WHOLE, "zb-h1": WHOLE, "gpipe": WHOLE}
N_ROUNDS = 7


def main() -> None:
    specs = [
        tp.RunSpec(MODEL, slicing, schedule=family, n_ranks=8, device="emulated", cost=COST)
        for family, slicing in CASES.items()
    ]
    result = tp.race(specs, n_rounds=N_ROUNDS)
    raced = result.table.loc[list(range(len(specs)))]
    emulated, simulated = raced["step_ms"].to_numpy(), raced["predicted_ms"].to_numpy()
    table = pd.DataFrame({"family": list(CASES), "emulated_ms": emulated, "simulated_ms": simulated})
    table["ratio"] = table["emulated_ms"] / table["simulated_ms"]
    paths = [len(each.critical_path()) for each in result.predicted or []]
    table["excess_us_an_action"] = (table["emulated_ms"] - table["simulated_ms"]) / paths * 1e3
    shortest = [float((each.frame["end_ms"] - each.frame["start_ms"]).min()) for each in result.predicted or []]
    print(table.assign(critical_actions=paths, shortest_action_ms=shortest).round(3).to_string(index=False))
    both = table.merge(table, how="cross", suffixes=("", "_other"))
    far = both[both["simulated_ms"] > 1.05 * both["simulated_ms_other"]]
    right = int((far["emulated_ms"] > far["emulated_ms_other"]).sum())
    print(f"of {len(far)} pairs whose simulated steps differ by more than 5 %, {right} are emulated in that order")
    print(f"A/A ±{result.aa_half_width:.4f}, {N_ROUNDS} rounds")


if __name__ == "__main__":
    main()
