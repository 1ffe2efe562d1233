"""How simulation time grows with the number of actions: time an action, as a ratio to the smallest case.

Linear growth keeps the ratio near 1. Best of several runs each, all sizes in turn.
"""

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


if __name__ == "__main__":
    main()
