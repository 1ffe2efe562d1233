"""How simulation time grows with the number of actions: time an action, as a ratio to the smallest case.

Linear growth keeps the ratio near 1. Best of several runs each, all sizes in turn. Then a sweep of
2,000 simulations, and the same sweep read back from its cache.
"""

import tempfile
import time

import terapipe as tp

CASES = [(8, 64), (24, 128), (48, 256), (96, 512)]  # ranks, units
N_ROUNDS = 5


def simulate_once(n_ranks: int, n_units: int) -> tuple[float, int]:
    cost = tp.CallableCost(lambda l, c, b: b * l * 1.0, lambda l, c, b: 2.0 * b * l)
    start = time.perf_counter()
    timeline = tp.simulate(tp.build_schedule("terapipe", n_ranks, tp.uniform_slicing(n_units, n_units)), cost)
    return time.perf_counter() - start, len(timeline.frame)


def main() -> None:
    best: dict[tuple[int, int], float] = {}
    sizes = {}
    for _ in range(N_ROUNDS):
        for case in CASES:
            seconds, sizes[case] = simulate_once(*case)
            best[case] = min(best.get(case, seconds), seconds)
    base = best[CASES[0]] / sizes[CASES[0]]
    print("ranks  units  actions  build + check + simulate [s]  time an action ÷ smallest case")
    for case in CASES:
        print(f"{case[0]:5}  {case[1]:5}  {sizes[case]:7}  {best[case]:28.3f}  {best[case] / sizes[case] / base:.2f}")
    sweep_2000()


def sweep_2000() -> None:
    cost = tp.CallableCost(lambda l, c, b: b * (1.0 + l), lambda l, c, b: 2.0 * b * (1.0 + l))
    grid = {"n_ranks": 8, "schedule": ["terapipe", "seq1f1b"], "seq_tokens": 64, "n_slices": 8, "n_microbatches": 8}
    grid |= {"cost": cost, "contention": [1 + index / 1000 for index in range(1000)]}
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            start = time.perf_counter()
            frame = tp.sweep(grid, directory=folder)
            print(f"sweep of {len(frame)} × 8 ranks × 64 units, {cache} cache: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
