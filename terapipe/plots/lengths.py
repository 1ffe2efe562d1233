"""Slicings as bars of slice lengths: one row a group of identical microbatches, tokens across."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from terapipe.errors import SlicingError
from terapipe.plots import style
from terapipe.plots.inputs import SlicingLike, as_slicing, by_name
from terapipe.search import SlicingSearch
from terapipe.slicing import MicrobatchSlices, SlicingPlan

_ROW_PX = 44
_BADGE = f"{style.EXTRAPOLATED} cost"


class _Row(NamedTuple):
    """Consecutive microbatches with the same slices."""

    label: str
    slices: MicrobatchSlices


def slicing(plan: SlicingLike | Mapping[str, SlicingLike]) -> go.Figure:
    """Slice lengths of every microbatch, identical neighbours drawn once ("×16").

    Parameters
    ----------
    plan : SlicingPlan, SlicingSearch, Slicing, str or {name: any of these}
        Text is the paper's notation. For a plan, the header states objective, latency and bound, for
        a search the step, its bound and the schedule; a badge beside the bars says where they rest
        on extrapolated costs.

    Returns
    -------
    Figure
        One trace, one bar a slice: `base` is its context length, `x` its length in tokens, `y` its row.

    Raises
    ------
    SlicingError
        For what is not a slicing.

    Examples
    --------
    >>> import terapipe as tp
    >>> tp.plots.slicing("[(1, [776, 640, 632])] * 16").data[0].x.tolist()
    [776, 640, 632]
    """
    plans: dict[str, SlicingLike] = by_name(plan)
    if not plans:
        raise SlicingError("no slicing given; a mapping needs at least one name.")
    rows = [row for name, each in plans.items() for row in _rows(name, each)]
    lengths = np.concatenate([row.slices.slice_tokens for row in rows])
    fig = go.Figure(_bars(rows, lengths))
    longest = max(sum(row.slices.slice_tokens) for row in rows)
    fig.update_xaxes(style.value_axis("position in the sequence (tokens)", 0, longest * 1.004))
    fig.update_yaxes(style.lane_axis("", [row.label for row in rows]))
    facts = [_facts(name, each) for name, each in plans.items() if isinstance(each, SlicingPlan | SlicingSearch)]
    text = "<br>".join(facts) or style.bold("Slicing")
    badges = _badges(plans)
    annotations = [style.header([text], ""), *badges]
    style.finish(fig, _ROW_PX * len(rows), annotations, top_px=56 + 18 * max(1, len(facts)), bottom_px=60)
    return fig.update_layout(margin_r=style.badge_margin_px([_BADGE])) if badges else fig


def _badges(plans: Mapping[str, SlicingLike]) -> list[dict[str, Any]]:
    """A warning right of the first row of each plan or search that rests on extrapolated costs."""
    badges, first = [], 0
    for name, each in plans.items():
        if isinstance(each, SlicingPlan | SlicingSearch) and each.extrapolated:
            badges.append(style.badge_beside(_BADGE, first))
        first += len(_rows(name, each))
    return badges


def _rows(name: str, given: SlicingLike) -> list[_Row]:
    microbatches = as_slicing(given).microbatches
    rows, first = [], 0
    for slices, run in groupby(microbatches):
        n = len(list(run))
        which = f"microbatches {first}…{first + n - 1}  ×{n}" if n > 1 else f"microbatch {first}"
        facts = [which] if len(microbatches) > 1 else []
        facts += [f"{slices.n_sequences} sequences"] if slices.n_sequences > 1 else []
        facts += [f"{slices.n_slices} slices" if slices.n_slices > 1 else "whole"]
        rows.append(_Row("<br>".join(part for part in (style.bold(name), ", ".join(facts)) if part), slices))
        first += n
    return rows


def _bars(rows: list[_Row], lengths: npt.NDArray[np.int64]) -> go.Bar:
    counts = [row.slices.n_slices for row in rows]
    lane = np.repeat(np.arange(len(rows)), counts)
    place = np.concatenate([np.arange(count) for count in counts])
    tone = style.tones(place, np.repeat(counts, counts) - 1, np.zeros_like(place))
    context = np.concatenate([row.slices.context_tokens for row in rows])
    shades = {"color": tone, "cmin": 0, "cmax": 1, "colorscale": style.KINDS["F"].colorscale}
    return go.Bar(
        orientation="h",
        y=lane,
        base=context.tolist(),
        x=lengths,
        marker={**shades, "line": {"color": "white", "width": float(len(lengths) <= 100 * len(rows))}},
        text=lengths if len(lengths) <= style.MAX_LABELLED else None,
        customdata=np.column_stack([place, lengths, context]),
        hovertemplate="<b>slice %{customdata[0]}</b><br>%{customdata[1]} tokens after %{customdata[2]}<extra></extra>",
        showlegend=False,
        **style.INSIDE,
    )


def _facts(name: str, given: SlicingPlan | SlicingSearch) -> str:
    bound = style.duration_text(given.lower_bound_ms)
    if isinstance(given, SlicingPlan):
        facts = [f"latency {style.duration_text(given.latency_ms)}", f"lower bound {bound}"]
        facts += [f'objective "{given.objective}"', f"{given.n_stages} stages"]
        return "  ·  ".join([style.bold(name or "Slicing plan"), *facts])
    limits = "" if given.bound_holds_for == "any cost" else " (not for any cost)"
    known = f"lower bound {bound}{limits}" if given.bound_holds_for else "no lower bound known"
    facts = [f"step {style.duration_text(given.makespan_ms)}", known]
    facts += [f'schedule "{given.schedule.name}"', f"{given.schedule.n_ranks} ranks"]
    return "  ·  ".join([style.bold(name or "Slicing search"), *facts])
