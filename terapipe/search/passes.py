"""Passes over the actions of a schedule, compiled: an order that respects their inputs, and when the last of them ends."""

import numpy as np
from numba import njit

from terapipe.search.replay import Floats, Indices


@njit(cache=True)
def topological_order(dependencies: Indices, rank_starts: Indices) -> Indices:
    """All actions of a valid schedule, each after its inputs: rank after rank as far as it can go, again and again."""
    n_ranks = len(rank_starts) - 1
    order = np.empty(len(dependencies), dtype=np.int64)
    done = np.zeros(len(dependencies) + 1, dtype=np.bool_)
    done[-1] = True  # index −1: no input
    heads = rank_starts[:-1].copy()
    n_done = 0
    while n_done < len(dependencies):
        for rank in range(n_ranks):
            action = heads[rank]
            while action < rank_starts[rank + 1] and done[dependencies[action, 0]] and done[dependencies[action, 1]]:
                if not done[dependencies[action, 2]]:
                    break
                done[action] = True
                order[n_done] = action
                n_done += 1
                action += 1
            heads[rank] = action
    return order


@njit(cache=True)
def longest_paths(inputs: Indices, rows: Indices, durations: Floats) -> Floats:
    """End of the last action, for each row of durations."""
    n_actions = len(inputs)
    ends = np.zeros(n_actions + 1)
    latest = np.zeros(len(durations))
    for case in range(len(durations)):
        last = 0.0
        for action in range(n_actions):
            start = max(ends[inputs[action, 0]], ends[inputs[action, 1]], ends[inputs[action, 2]], ends[inputs[action, 3]])
            end = start + durations[case, rows[action]]
            ends[action] = end
            last = max(last, end)
        latest[case] = last
    return latest
