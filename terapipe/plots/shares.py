"""Where the ranks' time went, as one stacked bar a timeline."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from terapipe.errors import TimelineError
from terapipe.plots import style
from terapipe.plots.inputs import TimelineLike, as_timeline, by_name
from terapipe.timeline import Timeline

_ROW_PX = 52


def budget(t: TimelineLike | Mapping[str, TimelineLike]) -> go.Figure:
    """Rank-milliseconds by compute, communication, dependency, fill, drain and runtime (`Timeline.budget`).

    Parameters
    ----------
    t : Timeline, DataFrame or {title: either}
        The bars of several stand below each other, each with its title, makespan and badge.

    Returns
    -------
    Figure
        One trace a part, in the order of `BUDGET`; the bars of a timeline add up to
        n_ranks × makespan.

    Raises
    ------
    TimelineError
        For what is not a timeline, or an empty mapping.
    """
    timelines = {title: as_timeline(each) for title, each in by_name(t).items()}
    if not timelines:
        raise TimelineError(f"{t!r} holds no timeline; a mapping needs at least one title.")
    table = pd.DataFrame([each.budget() for each in timelines.values()], columns=list(style.PARTS))
    totals = table.sum(axis=1).to_numpy(np.float64)
    fig = go.Figure([_part(name, table[name].to_numpy(np.float64), totals) for name in style.PARTS])
    fig.update_xaxes(style.value_axis("time of all ranks (rank-ms)", 0, totals.max() * 1.004 or 1.0))
    fig.update_yaxes(style.lane_axis("", [_label(title, each) for title, each in timelines.items()]))
    annotations = [style.header([style.bold("Where the ranks' time went")], "")]
    sources = [each.source for each in timelines.values()]
    annotations += [style.badge_beside(source, row) for row, source in enumerate(sources)]
    style.finish(fig, _ROW_PX * len(timelines), annotations)
    return fig.update_layout(barmode="stack", margin_r=style.badge_margin_px(sources), legend_traceorder="normal")


def _part(name: str, values: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> go.Bar:
    share = np.divide(values, totals, out=np.zeros_like(values), where=totals > 0)
    return go.Bar(
        name=name,
        orientation="h",
        y=np.arange(len(values)),
        x=values,
        marker={"color": style.PARTS[name], "line": {"color": "white", "width": 1}},
        text=[f"{each:.1%}" for each in share],
        customdata=share,
        hovertemplate=f"<b>{name}</b><br>%{{x:.5~g}} rank-ms<br>%{{customdata:.1%}} of rank time<extra></extra>",
        **style.INSIDE,
    )


def _label(title: str, timeline: Timeline) -> str:
    size = f"{timeline.n_ranks} ranks × {style.duration_text(timeline.makespan_ms)}"
    return "<br>".join(part for part in (style.bold(title), size) if part)
