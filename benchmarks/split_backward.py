"""What running the backward in two halves costs: F, I and W of a stage that queues its weight gradients, against F and B.

One process, one thread, one stage of the tour's model after the other: a first, a middle and a last
one. The two are timed by turns in shuffled order, so that a machine whose speed wanders slows both
alike; each turn gives one paired ratio. F and B against themselves show the noise.
"""

import numpy as np
import numpy.typing as npt
import torch

import terapipe as tp
from terapipe.engine.clock import Clock
from terapipe.engine.host import keep_memory
from terapipe.engine.probe import Point, time_slice
from terapipe.engine.rank import build_stage
from terapipe.engine.stage import Stage
from terapipe.experiment import paired_speedup

SEQ_TOKENS, N_STAGES, N_ROUNDS = 1024, 4, 40
POINTS: list[Point] = [(1024, 0, 1), (256, 0, 1), (256, 768, 1), (64, 512, 1)]


def time_rounds(stages: dict[str, Stage], point: Point, vocab_size: int) -> dict[str, npt.NDArray[np.float64]]:
    """Milliseconds of each part of every stage's step, a row a round."""
    shuffle, clock = np.random.default_rng(0), Clock()
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in stages}
    for _ in range(N_ROUNDS + 2):
        for name in shuffle.permutation(list(stages)).tolist():
            times[name].append(time_slice(stages[name], point, SEQ_TOKENS, vocab_size, clock))
    return {name: np.array(rows[2:]) for name, rows in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()  # as a rank does
    model = tp.ModelConfig.preset("tour")
    spec = tp.RunSpec(model, tp.uniform_slicing(SEQ_TOKENS, 1), n_ranks=N_STAGES)
    print("stage  slice  context    F+B ms   I ÷ B   W ÷ B   F+I+W over F+B [95 %]    F+B over itself [95 %]")
    for index in (0, 1, N_STAGES - 1):
        stages = {name: build_stage(spec, index, splits_backward=name == "split") for name in ("whole", "again", "split")}
        for point in POINTS:
            times = time_rounds(stages, point, model.vocab_size)
            totals = {name: rows.sum(axis=1) for name, rows in times.items()}
            split, same = (paired_speedup(totals[name], totals["whole"]) for name in ("split", "again"))
            backward, halves = np.median(times["whole"][:, 1]), np.median(times["split"][:, 1:], axis=0)
            print(
                f"{index:5} {point[0]:6} {point[1]:8} {np.median(totals['whole']):9.2f} {halves[0] / backward:7.3f} "
                f"{halves[1] / backward:7.3f}   {split[0]:.3f} [{split[1]:.3f}, {split[2]:.3f}]"
                f"     {same[0]:.3f} [{same[1]:.3f}, {same[2]:.3f}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
