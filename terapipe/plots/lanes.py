"""Timelines as lanes: one lane a rank, one bar an action, idle time the bare lane. Several share one time axis."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from terapipe.errors import TimelineError
from terapipe.plots import style
from terapipe.plots.curves import add_below
from terapipe.plots.inputs import TimelineLike, as_timeline, one_step
from terapipe.timeline import Timeline

Texts = npt.NDArray[np.object_]
_GAP_PX = 46  # between panels, for the header of the lower one


class _Panel(NamedTuple):
    """One step of one timeline, and what its header says."""

    title: str | None
    step: Timeline
    note: str

    @property
    def span(self) -> tuple[float, float]:
        """First start and last end."""
        return float(self.step.frame["start_ms"].min()), float(self.step.frame["end_ms"].max())

    @property
    def ranks(self) -> list[int]:
        """Ranks in the order of their lanes."""
        return sorted(int(rank) for rank in self.step.frame["rank"].unique())


def timeline(
    t: TimelineLike,
    step: int | None = None,
    title: str | None = None,
    critical_path: bool = False,
    memory: bool = False,
) -> go.Figure:
    """One step of a timeline: a lane a rank, a bar an action, idle time the bare grey lane.

    Within a microbatch, the bars grow paler from its first slice to its last; where microbatches are
    whole, they take turns. The header states makespan and bubble fraction of the step drawn, the
    badge where its times come from.

    Parameters
    ----------
    t : Timeline or DataFrame
        Times in milliseconds; a DataFrame needs the columns that `Timeline.from_frame` needs.
    step : int, optional
        By default the measured step with the median makespan, of two the faster.
    title : str, optional
        What stands before the numbers in the header.
    critical_path : bool
        Outline the actions of `Timeline.critical_path`, as one trace more ("critical path").
    memory : bool
        Below the lanes, what each rank holds over time (`plots.memory`), as one trace more a rank.

    Returns
    -------
    Figure
        One trace a kind (`legendgroup` "F", "B", "I", "W"): `base` and `x` are start and duration in
        ms, `y` the lane.

    Raises
    ------
    TimelineError
        For a step that is not there (those that are, are named), or what is not a timeline.
    """
    panel = _Panel(title, *one_step(as_timeline(t), step))
    fig = _draw([panel])
    if critical_path:
        fig.add_trace(_outline(panel))
    return add_below(fig, panel.step) if memory else fig


def compare(*timelines: TimelineLike | Mapping[str, TimelineLike], titles: Sequence[str] | None = None) -> go.Figure:
    """Two or more timelines above each other on one time axis, each with its badge, makespan and bubble fraction.

    Parameters
    ----------
    *timelines : Timeline, DataFrame, or one {title: timeline}
        Predicted and measured, or two schedules. Of several steps, the one with the median makespan.
    titles : list of str, optional
        One a timeline; with a mapping its keys are the titles.

    Returns
    -------
    Figure
        The traces of `timeline`, for one panel after the other.

    Raises
    ------
    TimelineError
        For fewer than two timelines, or another number of titles.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost = tp.CallableCost(lambda l, c, b: l, lambda l, c, b: 2 * l)
    >>> slicings = {"GPipe": tp.uniform_slicing(8, 1, 2), "TeraPipe": tp.uniform_slicing(8, 4, 2)}
    >>> runs = {name: tp.simulate(tp.build_schedule("terapipe", 4, each), cost) for name, each in slicings.items()}
    >>> [trace.legendgroup for trace in tp.plots.compare(runs).data]
    ['F', 'B', 'F', 'B']
    """
    given: list[Any] = list(timelines)
    if len(given) == 1 and isinstance(given[0], Mapping):
        if titles is not None:
            raise TimelineError(f"titles={titles!r} beside a mapping: its keys {list(given[0])} are the titles.")
        titles, given = [str(name) for name in given[0]], list(given[0].values())
    if len(given) < 2:
        raise TimelineError(f"compare needs at least 2 timelines, {len(given)} given; plots.timeline draws one.")
    if titles is not None and len(titles) != len(given):
        raise TimelineError(f"{len(titles)} titles {list(titles)} for {len(given)} timelines; give one for each.")
    return _draw([_Panel(name, *one_step(as_timeline(each), None)) for name, each in zip_longest(titles or [], given)])


def _draw(panels: list[_Panel]) -> go.Figure:
    counts = [len(panel.ranks) for panel in panels]
    lane_px = min(max(560 / sum(counts), 14), 40)
    plot_px = max(lane_px * sum(counts), 60) + _GAP_PX * (len(panels) - 1)
    spacing = _GAP_PX / plot_px if len(panels) > 1 else 0
    fig = make_subplots(len(panels), 1, shared_xaxes=True, vertical_spacing=spacing, row_heights=counts)
    low, high = min(panel.span[0] for panel in panels), max(panel.span[1] for panel in panels)
    low = 0.0 if 0 <= low < 0.05 * high else low
    frames = pd.concat([panel.step.frame for panel in panels])
    meaning, show_text = _bar_text_style(frames)
    lanes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for row, panel in enumerate(panels, start=1):
        axis = "" if row == 1 else str(row)
        fig.add_traces(_bars(panel, (high - low) / style.WIDTH_PX, show_text), rows=row, cols=1)
        fig.update_yaxes(style.lane_axis("rank", [str(rank) for rank in panel.ranks]), row=row)
        lanes += _lanes(panel, axis)
        annotations += [_header(panel, axis), style.badge(panel.step.source, axis)]
    _list_each_kind_once(fig)
    margin = (high - low or 1.0) * 0.004
    fig.update_xaxes(style.value_axis("", low - margin, high + margin))
    fig.update_xaxes(title_text="time (ms)", row=len(panels))
    # All lanes at once: add_shape redraws the figure for each.
    fig.update_layout(shapes=lanes, legend_title_text=f"{meaning}grey: idle")
    return style.finish(fig, plot_px, annotations)


def _header(panel: _Panel, axis: str) -> dict[str, Any]:
    makespan = panel.step.makespan_ms
    numbers = [f"makespan {style.duration_text(makespan)}"]
    if makespan > 0:
        numbers.append(f"bubble fraction {panel.step.bubble_fraction:.1%}")
    return style.header([style.bold(panel.title), *numbers, panel.note], axis)


def _lanes(panel: _Panel, axis: str) -> list[dict[str, Any]]:
    """A grey lane a rank, from the step's first start to its last end: what no bar covers is idle."""
    begin, end = panel.span
    place = {"type": "rect", "layer": "below", "xref": f"x{axis}", "yref": f"y{axis}", "x0": begin, "x1": end}
    look = {"fillcolor": style.IDLE, "line": {"width": 0}}
    half = (1 - style.BAR_GAP) / 2
    return [{**place, **look, "y0": lane - half, "y1": lane + half} for lane in range(len(panel.ranks))]


def _bars(panel: _Panel, ms_per_px: float, show_text: Callable[[pd.DataFrame], Texts] | None) -> list[go.Bar]:
    """One trace a kind, in the order of the legend."""
    rows = panel.step.frame
    duration = (rows["end_ms"] - rows["start_ms"]).to_numpy(np.float64)
    last = rows.groupby("microbatch")["slice"].transform("max")
    # A white edge would hide bars a few pixels wide.
    edge = float(np.quantile(duration, 0.1) > 5 * ms_per_px)
    columns: dict[str, npt.NDArray[Any]] = {
        "y": np.searchsorted(panel.ranks, rows["rank"].to_numpy()),
        "base": rows["start_ms"].to_numpy(np.float64),
        "x": duration,
        "tone": style.tones(rows["slice"].to_numpy(), last.to_numpy(), rows["microbatch"].to_numpy()),
    }
    columns["customdata"], template = _hover(rows, duration)
    if show_text:
        columns["text"] = show_text(rows)
    traces = []
    for kind, look in style.KINDS.items():
        here = (rows["kind"] == kind).to_numpy()
        if not here.any():
            continue
        chosen: dict[str, Any] = {name: column[here] for name, column in columns.items()}
        chosen["base"] = chosen["base"].tolist()  # plotly would keep an array as one of objects
        shades = {"color": chosen.pop("tone"), "cmin": 0, "cmax": 1, "colorscale": look.colorscale}
        marker = {**shades, "line": {"color": "white", "width": edge}}
        words = {"name": f"{kind} {look.label}", "legendgroup": kind, "hovertemplate": template}
        traces.append(go.Bar(orientation="h", marker=marker, **words, **chosen, **style.INSIDE))
    return traces


def _outline(panel: _Panel) -> go.Bar:
    """The bars of the critical path, empty and edged: above the others, which would cover an edge of their own."""
    path = panel.step.critical_path()
    return go.Bar(
        name="critical path",
        legendgroup="critical path",
        orientation="h",
        y=np.searchsorted(panel.ranks, path["rank"].to_numpy()),
        base=path["start_ms"].tolist(),
        x=(path["end_ms"] - path["start_ms"]).to_numpy(np.float64),
        marker={"color": "rgba(0,0,0,0)", "line": {"color": style.PATH, "width": 2.5}},
        hoverinfo="skip",
        legendrank=len(style.KINDS) + 1,
    )


def _list_each_kind_once(fig: go.Figure) -> None:
    """In the legend, for all panels; in the order of the kinds."""
    seen: set[str] = set()
    order = list(style.KINDS)
    for trace in fig.data:
        trace.update(showlegend=trace.legendgroup not in seen, legendrank=order.index(trace.legendgroup))
        seen.add(trace.legendgroup)


def _bar_text_style(rows: pd.DataFrame) -> tuple[str, Callable[[pd.DataFrame], Texts] | None]:
    """What the legend says about the text in bars, and the texts of a table: as short as they can be told apart."""
    if len(rows) > style.MAX_LABELLED:
        return "", None
    if rows["slice"].max() == 0:
        return "in bars: microbatch · ", lambda table: _texts(table, "microbatch")
    if rows["microbatch"].max() == 0:
        return "in bars: slice · ", lambda table: _texts(table, "slice")
    return "in bars: microbatch.slice · ", lambda table: _texts(table, "microbatch") + "." + _texts(table, "slice")


def _texts(rows: pd.DataFrame, column: str) -> Texts:
    texts: Texts = rows[column].astype(str).to_numpy(object)
    return texts


def _hover(rows: pd.DataFrame, duration: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.object_], str]:
    """One row an action for the hover, and its template; what a given table does not know is left out."""
    names = ["stage", "microbatch", "slice", "slice_tokens", "context_tokens", "start_ms", "end_ms", "blocked_by"]
    action = _texts(rows, "stage") + rows["kind"].to_numpy(object) + _texts(rows, "microbatch") + "." + _texts(rows, "slice")
    blocked = rows["blocked_by"].replace("", "nothing")
    columns = [action, *(rows.assign(blocked_by=blocked)[name].to_numpy(object) for name in names), duration.astype(object)]
    lines = [
        "<b>%{customdata[0]}</b>",
        "stage %{customdata[1]}, microbatch %{customdata[2]}, slice %{customdata[3]}",
        *(["%{customdata[4]} tokens after %{customdata[5]}"] if (rows["slice_tokens"] > 0).any() else []),
        "%{customdata[6]:.7~g} to %{customdata[7]:.7~g} ms: %{customdata[9]:.5~g} ms",
        *(["waited for %{customdata[8]}"] if (rows["blocked_by"] != "").any() else []),
    ]
    return np.column_stack(columns), "<br>".join(lines) + "<extra></extra>"
