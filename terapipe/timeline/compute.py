"""What a timeline's compute takes without contention, and without being cut: the basis of a budget's split."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from terapipe.cost import CostModel
from terapipe.errors import CostError, TimelineError, as_number

Costs = CostModel | Sequence[CostModel]
_UNIT = ["step", "microbatch", "slice"]


def alone_ms(rows: pd.DataFrame, contention: float) -> "pd.Series[float]":
    """What each action takes on a machine to itself, if 1/contention of the work is done while two or more run.

    Raises
    ------
    CostError
        For a contention that is not a finite number ≥ 1.
    """
    slowdown = check_contention(contention)
    steps = [_work_done(step, slowdown) for _, step in rows.groupby("step")]
    return pd.concat(steps).reindex(rows.index)


def check_contention(contention: float) -> float:
    """The contention itself.

    Raises
    ------
    CostError
        For one that is not a finite number ≥ 1.
    """
    slowdown = as_number(contention)
    if not 1 <= slowdown < np.inf:
        raise CostError(f"contention={contention!r}: needs a finite number ≥ 1.")
    return slowdown


def _work_done(rows: pd.DataFrame, contention: float) -> "pd.Series[float]":
    start, end = (rows[name].to_numpy(np.float64) for name in ("start_ms", "end_ms"))
    times = np.unique(np.concatenate([start, end]))
    n_running = np.searchsorted(np.sort(start), times, "right") - np.searchsorted(np.sort(end), times, "right")
    rate = np.where(n_running[:-1] > 1, 1 / contention, 1.0)
    work = np.concatenate([[0.0], np.cumsum(rate * np.diff(times))])
    return pd.Series(np.interp(end, times, work) - np.interp(start, times, work), index=rows.index)


def whole_ratio(rows: pd.DataFrame, cost: Costs) -> "pd.Series[float]":
    """For each action: what its microbatch takes in one slice ÷ in the slices it has, on its stage and of its kind.

    Raises
    ------
    TimelineError
        Where slice lengths are unknown, or slices of a microbatch are missing.
    CostError
        For another number of cost models than stages; where a cost refuses or forbids a whole microbatch, or
        only extrapolates to it while it knows the slices.
    """
    slices = _slices(rows)
    stages = sorted(int(stage) for stage in rows["stage"].unique())
    costs = [cost] * (stages[-1] + 1) if isinstance(cost, CostModel) else list(cost)
    if len(costs) <= stages[-1]:
        raise CostError(f"{len(costs)} cost models for stages 0…{stages[-1]}; give one for all, or one for each.")
    ratio = pd.Series(np.nan, index=rows.index)
    for stage in stages:
        for kind, used in rows[rows["stage"] == stage].groupby("kind"):
            table = _ratios(slices, costs[stage], str(kind))
            ratio[used.index] = table.reindex(pd.MultiIndex.from_frame(used[_UNIT])).to_numpy()
    return ratio


def _slices(rows: pd.DataFrame) -> pd.DataFrame:
    """Every slice once, by step, microbatch and place: slice_tokens, context_tokens, n_sequences."""
    lengths = ["slice_tokens", "context_tokens", "n_sequences"]
    slices = rows[[*_UNIT, *lengths]].drop_duplicates(_UNIT).sort_values(_UNIT)
    if slices[lengths].isna().to_numpy().any():
        raise TimelineError(
            "this timeline does not know how long its slices are, so no cost model can say what they take: it needs "
            "the columns slice_tokens and context_tokens. Leave cost out, and compute stays one part."
        )
    of_each = slices.groupby(["step", "microbatch"])
    before = of_each["slice_tokens"].cumsum() - slices["slice_tokens"]
    total, seq_tokens = of_each["slice_tokens"].transform("sum"), (slices["slice_tokens"] + slices["context_tokens"]).max()
    odd = (before != slices["context_tokens"]) | (total != seq_tokens)
    if odd.any():
        step, microbatch = (int(slices[odd].iloc[0][name]) for name in ("step", "microbatch"))
        raise TimelineError(
            f"the slices of microbatch {microbatch} in step {step} do not add up to its {seq_tokens:g} tokens: some are "
            "missing. What it takes whole can then not be shared out; leave cost out."
        )
    return slices


def _ratios(slices: pd.DataFrame, cost: CostModel, kind: str) -> "pd.Series[float]":
    """Of one stage and kind, for every slice."""
    function = {"F": cost.forward_ms, "B": cost.backward_ms, "I": cost.input_ms, "W": cost.weight_ms}[kind]
    lengths, contexts, sequences = (slices[name].to_numpy() for name in ("slice_tokens", "context_tokens", "n_sequences"))
    whole = slices.groupby(["step", "microbatch"])["slice_tokens"].transform("sum").to_numpy()
    nothing = np.zeros_like(contexts)
    uncut = np.broadcast_to(function(whole, nothing, sequences), whole.shape)
    if not np.isfinite(uncut).all():
        raise CostError(f"a whole microbatch of {whole.max():g} tokens has an infinite cost: what slicing adds is unknown.")
    beyond = np.any(cost.is_extrapolated(whole, nothing, sequences))
    if beyond and not np.any(cost.is_extrapolated(lengths, contexts, sequences)):
        raise CostError(
            f"a whole microbatch of {whole.max():g} tokens lies beyond what was measured: what slicing adds would be "
            "extrapolated. Profile lengths up to the whole sequence, or leave cost out."
        )
    cut = pd.Series(
        np.broadcast_to(function(lengths, contexts, sequences), whole.shape), index=pd.MultiIndex.from_frame(slices[_UNIT])
    )
    total = cut.groupby(level=["step", "microbatch"]).transform("sum").to_numpy(np.float64)
    # Slices that cost nothing have nothing to share out.
    return pd.Series(np.divide(uncut, total, out=np.ones(len(total)), where=total > 0), index=cut.index)
