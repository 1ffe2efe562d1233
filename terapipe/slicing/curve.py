"""The two terms of eq. (6) as functions of t_max: what the slicing DP trades against each other."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from terapipe.cost import CostModel
from terapipe.errors import SlicingError, check_integer
from terapipe.slicing.latency import distinct, stage_costs
from terapipe.slicing.optimal import optimal_slicing
from terapipe.slicing.tables import Grid, slice_costs


def t_max_curve(
    cost: CostModel | Sequence[CostModel],
    seq_tokens: int,
    n_stages: int,
    n_points: int = 60,
    granularity_tokens: int = 1,
    min_slice_tokens: int = 1,
) -> pd.DataFrame:
    """S*(t_max), (K−1)·t_max and their sum, eq. (6) of TeraPipe (ICML 2021), for t_max from the least possible up.

    Parameters
    ----------
    cost, seq_tokens, n_stages, granularity_tokens, min_slice_tokens
        As in `optimal_slicing`, whose objective here is "paper".
    n_points : int
        Values of t_max, evenly spaced in proportion; the optimum's own is added.

    Returns
    -------
    DataFrame
        t_max_ms; sum_ms, the least Σ t over slicings whose slices all take at most t_max; waiting_ms =
        (K−1)·t_max; latency_ms, their sum; n_slices; optimal, true for the row of the optimum;
        extrapolated, true where any slice to choose among has a cost beyond what was measured.
    """
    from terapipe.slicing.boxes import Program  # numba loads only where it is needed

    check_integer("n_points", n_points, 2, SlicingError)
    alike = distinct(stage_costs(cost, n_stages))
    if len(alike) > 1:
        raise SlicingError(f"{len(alike)} different costs: eq. (6) is for stages that are alike. Give one cost.")
    grid = Grid(seq_tokens, granularity_tokens, min_slice_tokens)
    best = optimal_slicing(cost, seq_tokens, n_stages, 1, granularity_tokens, "paper", None, min_slice_tokens)
    step_ms = slice_costs(alike, grid, [1])[0].sum(axis=0)
    program = Program(step_ms, step_ms[np.newaxis], n_stages - 1, grid.n_units)
    reachable = step_ms[np.isfinite(step_ms) & (step_ms > 0)]
    limits = np.geomspace(reachable.min(), reachable.max(), n_points) if len(reachable) else np.zeros(1)
    rows = []
    for limit in np.unique([*limits, best.t_max_ms]):
        total, cut = program.solve(np.array([limit]))
        if cut:
            waiting = (n_stages - 1) * limit
            rows.append((limit, total, waiting, total + waiting, len(cut[0][1]), limit == best.t_max_ms))
    columns = ["t_max_ms", "sum_ms", "waiting_ms", "latency_ms", "n_slices", "optimal"]
    return pd.DataFrame(rows, columns=columns).assign(extrapolated=best.extrapolated)
