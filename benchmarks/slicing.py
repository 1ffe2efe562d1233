"""The slicing DP against a plain implementation of the paper's enumeration, both compiled, in one run.

The enumeration (TeraPipe, section 3.3) tries every t_max from the smallest up, solves one dynamic
program each and stops when K·t_max passes the best; values closer than ε are skipped, which can lose
up to K·ε. Ratios are enumeration ÷ ours; compile time is apart. Then how our time grows with L and B.
"""

import os

os.environ["NUMBA_NUM_THREADS"] = "1"

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from numba import njit

import terapipe as tp

N_REPEATS = 5
EPSILON_MS = 0.1


def cost_of(n_stages: int, floor: int = 96) -> tp.CallableCost:
    """A V100-like stage of 96 layers over `n_stages`; a third of it forward."""

    def step_ms(l, c, b):
        layer = 4.5e-5 * np.maximum(b * l, floor) + 6e-9 * b * l * (c + l / 2)
        return 1e3 * (layer * (96 / n_stages) + 2 * (5e-5 + 4e-7 * b * l))

    return tp.CallableCost(lambda l, c, b: step_ms(l, c, b) / 3, lambda l, c, b: 2 * step_ms(l, c, b) / 3)


@njit(cache=False)
def enumerate_t_max(times, candidates, n_stages, batch, epsilon_ms):
    """Eq. (6) by trying every t_max: times[size, length, context] in units of the granularity."""
    n_sizes, n = times.shape[0], times.shape[1] - 1
    best, last, n_programs = np.inf, -np.inf, 0
    least, whole, filled = np.empty(n + 1), np.empty(n_sizes), np.empty(batch + 1)
    for t_max in candidates:
        if t_max - last < epsilon_ms:
            continue
        if n_stages * t_max >= best:
            break
        last, n_programs = t_max, n_programs + 1
        for size in range(n_sizes):
            least[0] = 0.0
            for end in range(1, n + 1):
                least[end] = np.inf
                for length in range(1, end + 1):
                    step = times[size, length, end - length]
                    if step <= t_max and least[end - length] + step < least[end]:
                        least[end] = least[end - length] + step
            whole[size] = least[n]
        filled[0] = 0.0
        for total in range(1, batch + 1):
            filled[total] = np.inf
            for size in range(min(n_sizes, total)):
                filled[total] = min(filled[total], filled[total - size - 1] + whole[size])
        best = min(best, filled[batch] + (n_stages - 1) * t_max)
    return best, n_programs


def enumeration(cost: tp.CostModel, seq_tokens: int, n_stages: int, batch: int, granularity: int, epsilon_ms: float):
    n = seq_tokens // granularity
    lengths, contexts = np.meshgrid(np.arange(n + 1), np.arange(n), indexing="ij")
    fits = (lengths + contexts <= n) & (lengths > 0)
    times = np.full((batch, n + 1, n), np.inf)
    for size in range(batch):
        times[size][fits] = cost.step_ms(lengths[fits] * granularity, contexts[fits] * granularity, size + 1)
    return enumerate_t_max(times, np.unique(times[np.isfinite(times)]), n_stages, batch, epsilon_ms)


def seconds(function: Callable[[], object], n_repeats: int = N_REPEATS) -> tuple[float, object]:
    taken = []
    for _ in range(n_repeats):
        start = time.perf_counter()
        result = function()
        taken.append(time.perf_counter() - start)
    return median(taken), result


def plan(seq_tokens: int, granularity: int, n_stages: int, batch: int = 1, objective: str = "paper"):
    return tp.optimal_slicing(cost_of(n_stages), seq_tokens, n_stages, batch, granularity, objective)


def against_the_enumeration() -> None:
    print("\nAgainst the enumeration (objective paper): seconds, enumeration ÷ ours, and what skipping loses")
    print("  tokens  granularity   K   B    ours [s]  programs  enumeration [s]  programs  ε [ms]   ratio   excess")
    cases = [(2048, 8, 48, 1, 0.0), (2048, 8, 48, 1, EPSILON_MS)]
    cases += [(8192, 8, 48, 1, 0.0), (8192, 8, 48, 1, EPSILON_MS), (2048, 8, 40, 32, EPSILON_MS)]
    for seq_tokens, granularity, n_stages, batch, epsilon in cases:
        ours, found = seconds(lambda case=(seq_tokens, granularity, n_stages, batch): plan(*case))
        arguments = (cost_of(n_stages), seq_tokens, n_stages, batch, granularity, epsilon)
        theirs, (latency, n_programs) = seconds(lambda given=arguments: enumeration(*given), 1)
        print(
            f"{seq_tokens:8} {granularity:12} {n_stages:3} {batch:3} {ours:11.3f} {found.n_programs:9} {theirs:16.2f} "
            f"{n_programs:9} {epsilon:7} {theirs / ours:7.0f} {latency / found.latency_ms - 1:8.4%}",
            flush=True,
        )


def slider_cases() -> None:
    print("\nWhat a slider asks, median of 5: seconds")
    print("  tokens  granularity   K   B  objective   ours [s]  programs")
    cases = [(2048, 1, n_stages, 1) for n_stages in (8, 48, 96)] + [(8192, 8, 48, 1), (131_072, 64, 64, 1), (2048, 8, 40, 32)]
    for objective in ("paper", "two-phase"):
        for seq_tokens, granularity, n_stages, batch in cases:
            arguments = (seq_tokens, granularity, n_stages, batch, objective)
            ours, found = seconds(lambda given=arguments: plan(*given))
            print(
                f"{seq_tokens:8} {granularity:12} {n_stages:3} {batch:3}  {objective:9} {ours:10.3f} {found.n_programs:9}",
                flush=True,
            )


def growth() -> None:
    print("\nGrowth with L (granularity 1, K = 48) and with B (2,048 tokens at 16, K = 40): time ÷ time of the case above")
    for name, cases in (
        ("L", [(seq_tokens, 1, 48, 1) for seq_tokens in (512, 1024, 2048, 4096)]),
        ("B", [(2048, 16, 40, batch) for batch in (4, 8, 16, 32, 64)]),
    ):
        before = None
        for case in cases:
            taken, found = seconds(lambda given=case: plan(*given), 3)
            ratio = "" if before is None else f"×{taken / before:.1f}"
            print(f"  {name} = {case[0] if name == 'L' else case[3]:5}: {taken:7.3f} s, {found.n_programs:4} programs  {ratio}")
            before = taken


def main() -> None:
    compiling, _ = seconds(lambda: plan(64, 8, 4), 1)
    _ = enumeration(cost_of(4), 64, 4, 1, 8, 0.0)
    print(f"Compiled (or read from the cache) in {compiling:.1f} s, not counted below.")
    slider_cases()
    against_the_enumeration()
    growth()


if __name__ == "__main__":
    main()
