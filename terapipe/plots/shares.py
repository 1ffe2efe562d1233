"""Where the ranks' time went, as one stacked bar a timeline."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from terapipe.cost import CostModel
from terapipe.errors import TimelineError
from terapipe.plots import style
from terapipe.plots.inputs import TimelineLike, as_timeline, by_name
from terapipe.timeline import Timeline

_ROW_PX = 52


def budget(
    t: TimelineLike | Mapping[str, TimelineLike],
    cost: CostModel | Sequence[CostModel] | None = None,
    contention: float | None = None,
) -> go.Figure:
    """Rank-milliseconds by the parts of `Timeline.budget`; parts below 0 stand left of 0.

    Parameters
    ----------
    t : Timeline, DataFrame or {title: either}
        The bars of several stand below each other, each with its title, makespan and badge.
    cost, contention
        As in `Timeline.budget`, for those that are not simulated. Without them their compute is one part,
        "compute", beside simulations whose compute is split.

    Returns
    -------
    Figure
        One trace a part that any timeline has, in the order of `BUDGET`; no text where a timeline does not
        have it. The bars of a timeline add up to n_ranks × makespan.

    Raises
    ------
    TimelineError
        For what is not a timeline, or an empty mapping.
    """
    timelines = {title: as_timeline(each) for title, each in by_name(t).items()}
    if not timelines:
        raise TimelineError(f"{t!r} holds no timeline; a mapping needs at least one title.")
    table = pd.DataFrame([each.budget(cost, contention) for each in timelines.values()])
    table = table[[name for name in style.PARTS if name in table]]
    known = table.notna()
    table = table.fillna(0.0)  # plotly stacks what follows a NaN in the wrong place
    totals = table.sum(axis=1).to_numpy(np.float64)
    fig = go.Figure(
        [_part(str(name), table[name].to_numpy(np.float64), known[name].tolist(), totals) for name in table.columns]
    )
    low, high = float(table.clip(upper=0).sum(axis=1).min()), float(table.clip(lower=0).sum(axis=1).max())
    margin = (high - low or 1.0) * 0.004
    # Rounding leaves zeros a hair below 0, which need no room.
    fig.update_xaxes(style.value_axis("time of all ranks (rank-ms)", low - margin if low < -margin else 0, high + margin))
    fig.update_yaxes(style.lane_axis("", [_label(title, each) for title, each in timelines.items()]))
    annotations = [style.header([style.bold("Where the ranks' time went")], "")]
    sources = [each.source for each in timelines.values()]
    annotations += [style.badge_beside(source, row) for row, source in enumerate(sources)]
    style.finish(fig, _ROW_PX * len(timelines), annotations)
    return fig.update_layout(barmode="relative", margin_r=style.badge_margin_px(sources), legend_traceorder="normal")


def _part(name: str, values: npt.NDArray[np.float64], known: list[bool], totals: npt.NDArray[np.float64]) -> go.Bar:
    title = name.replace("_", " ")
    share = np.divide(values, totals, out=np.zeros_like(values), where=totals > 0)
    return go.Bar(
        name=title,
        orientation="h",
        y=np.arange(len(values)),
        x=values,
        marker={"color": style.PARTS[name], "line": {"color": "white", "width": 1}},
        text=[f"{each:.1%}" if is_known else "" for each, is_known in zip(share, known, strict=True)],
        customdata=share,
        hovertemplate=f"<b>{title}</b><br>%{{x:.5~g}} rank-ms<br>%{{customdata:.1%}} of rank time<extra></extra>",
        **style.INSIDE,
    )


def _label(title: str, timeline: Timeline) -> str:
    size = f"{timeline.n_ranks} ranks × {style.duration_text(timeline.makespan_ms)}"
    return "<br>".join(part for part in (style.bold(title), size) if part)
