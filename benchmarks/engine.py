"""What slices cost and buy on this machine's ranks: equal slicings raced against one slice, in one launch.

Two factors, never mixed: compute sliced ÷ whole (kernels), and the speed-up over an unsliced pipeline.
"""

import terapipe as tp

SEQ_TOKENS, N_SLICES, N_ROUNDS = 1024, (1, 2, 4, 8, 16), 8


def main() -> None:
    model = tp.ModelConfig.preset("tour")
    specs = [tp.RunSpec(model, tp.uniform_slicing(SEQ_TOKENS, n)) for n in N_SLICES]
    result = tp.race(specs, n_rounds=N_ROUNDS)
    table = result.table
    busy = [run.timeline.steps["busy_ms"].median() for run in result.runs]
    table["compute_sliced_over_whole"] = [each / busy[0] for each in busy] + [float("nan")]
    table.insert(0, "n_slices", [*N_SLICES, N_SLICES[0]])
    print(table.round(3).to_string())
    print(f"noise (A/A pair): ±{result.aa_half_width:.3f}")


if __name__ == "__main__":
    main()
