"""What ranks hold over time, as step curves: a line a rank, or the parts of one rank; also below a timeline's lanes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from terapipe.errors import TimelineError, as_number
from terapipe.plots import style
from terapipe.plots.inputs import TimelineLike, as_timeline, by_name, one_step
from terapipe.timeline import Timeline

_PANEL_PX, _GAP_PX = 230, 46
_BELOW_PX, _BELOW_GAP_PX = 150, 18  # under lanes


class _Scale(NamedTuple):
    """What the vertical axis counts, and by how much a value is divided."""

    column: str
    name: str
    size: float

    @property
    def title(self) -> str:
        """Of the axis."""
        return "units held" if self.column == "units" else f"memory ({self.name})"

    def text(self, value: float) -> str:
        """A value with its unit."""
        return f"{value / self.size:.4g} {self.name}"


def memory(
    t: TimelineLike | Mapping[str, TimelineLike],
    rank: int | None = None,
    cap_bytes: float | None = None,
    step: int | None = None,
    units: bool = False,
) -> go.Figure:
    """What ranks hold over one step; of several timelines, a panel each on shared axes.

    A curve changes where an action ends (`Timeline.memory`): what an action needs only while it runs is
    not in it. The header states the highest peak and its rank.

    Parameters
    ----------
    t : Timeline, DataFrame, or {title: timeline}
        Bytes where every one of them knows them, else units.
    rank : int, optional
        Draw the parts of this rank's bytes, stacked; by default a line a rank.
    cap_bytes : float, optional
        A dashed line.
    step : int, optional
        By default the measured step with the median makespan, of two the faster.
    units : bool
        Draw units, though bytes are known.

    Returns
    -------
    Figure
        One trace a rank ("rank 0", …), or a part ("weights", "activations", …): x in ms, y in the unit
        that the axis names; from the step's start to its end.

    Raises
    ------
    TimelineError
        For a step or rank that is not there; for parts or a cap where bytes are not known.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost, model = tp.CallableCost(lambda l, c, b: l, lambda l, c, b: 2 * l), tp.ModelConfig(2, 64, 4)
    >>> schedule = tp.build_schedule("seq1f1b", 2, tp.uniform_slicing(64, 4, 4))
    >>> fig = tp.plots.memory(tp.simulate(schedule, cost, memory=tp.MemoryModel(model)))
    >>> [trace.name for trace in fig.data]
    ['rank 0', 'rank 1']
    """
    panels = {title: one_step(as_timeline(each), step) for title, each in by_name(t).items()}
    if not panels:
        raise TimelineError("no timeline to draw: give one, or {title: timeline}.")
    scale = _find_scale([each for each, _ in panels.values()], cap_bytes, units, rank)
    n_gaps = len(panels) - 1
    plot_px = _PANEL_PX * len(panels) + _GAP_PX * n_gaps
    fig = make_subplots(
        len(panels), 1, shared_xaxes=True, shared_yaxes="all", vertical_spacing=_GAP_PX / plot_px * bool(n_gaps)
    )
    annotations = []
    for row, (title, (each, note)) in enumerate(panels.items(), start=1):
        axis = "" if row == 1 else str(row)
        traces = _lines(each, scale) if rank is None else _parts(each, scale, rank)
        for trace in traces:
            trace.update(showlegend=row == 1)
        fig.add_traces(traces, rows=row, cols=1)
        annotations += [style.header([style.bold(title), _peak_text(each, scale, rank), note], axis)]
        annotations += [style.badge(each.source, axis)]
    if cap_bytes is not None:
        fig.update_layout(shapes=[_cap(cap_bytes, scale, str(row) if row else "") for row in (0, *range(2, len(panels) + 1))])
    starts = [float(each.frame["start_ms"].min()) for each, _ in panels.values()]
    ends = [float(each.frame["end_ms"].max()) for each, _ in panels.values()]
    low = 0.0 if 0 <= min(starts) < 0.05 * max(ends) else min(starts)
    fig.update_xaxes(style.value_axis("", low, max(ends)))
    fig.update_xaxes(title_text="time (ms)", row=len(panels))
    fig.update_yaxes(_axis(scale, [each for each, _ in panels.values()], cap_bytes, rank))
    fig.update_layout(legend_title_text="" if rank is None else f"rank {rank}: ")
    return style.finish(fig, plot_px, annotations)


def add_below(fig: go.Figure, step: Timeline) -> go.Figure:
    """Draw one step's curves, a line a rank, below the lanes of a figure with one panel, on its time axis."""
    scale = _find_scale([step], None, False, None)
    top, bottom = fig.layout.margin.t, fig.layout.margin.b
    lanes_px = fig.layout.height - top - bottom
    plot_px = lanes_px + _BELOW_GAP_PX + _BELOW_PX
    fig.add_traces([trace.update(xaxis="x2", yaxis="y2") for trace in _lines(step, scale)])
    fig.update_layout(
        height=plot_px + top + bottom,
        yaxis_domain=[1 - lanes_px / plot_px, 1],
        xaxis={"title": {"text": ""}, "showticklabels": False},
        xaxis2=style.value_axis("time (ms)", *fig.layout.xaxis.range) | {"anchor": "y2", "matches": "x"},
        yaxis2=_axis(scale, [step], None, None) | {"anchor": "x2", "domain": [0, _BELOW_PX / plot_px]},
    )
    return fig


def _find_scale(timelines: list[Timeline], cap_bytes: float | None, units: bool, rank: int | None) -> _Scale:
    tables = [each.memory for each in timelines]
    if units or any(table["total_bytes"].isna().any() for table in tables):
        if cap_bytes is not None or rank is not None:
            asked = f"cap_bytes={cap_bytes!r}" if cap_bytes is not None else f"rank={rank!r}"
            raise TimelineError(
                f"{asked} needs bytes, and units are drawn. Leave units=True out, and give timelines that know bytes: "
                "tp.simulate(…, memory=MemoryModel(model, dtype)), or RunSpec(…, measure_memory=True)."
            )
        return _Scale("units", "units", 1.0)
    if cap_bytes is not None and not as_number(cap_bytes) > 0:
        raise TimelineError(f"cap_bytes={cap_bytes!r}: needs a positive number of bytes.")
    known = sorted({int(each) for table in tables for each in table["rank"]})
    if rank is not None and any(rank not in set(table["rank"]) for table in tables):
        raise TimelineError(f"no rank {rank!r} in every timeline; ranks: {known}.")
    most = max(float(table["total_bytes"].max()) for table in tables)
    return _Scale("total_bytes", *style.byte_unit(most))


def _curve(step: Timeline, rank: int) -> pd.DataFrame:
    """A rank's rows, between the step's start, where it holds its weights alone, and the step's end."""
    rows = step.memory[step.memory["rank"] == rank].sort_values("time_ms", kind="stable")
    first, last = rows.head(1).copy(), rows.tail(1).copy()
    held = ["units", "activation_bytes", "context_bytes", "queue_bytes"]
    first[held] = first[held] * 0
    first["total_bytes"], first["time_ms"] = first["weight_bytes"], step.frame["start_ms"].min()
    last["time_ms"] = step.frame["end_ms"].max()
    return pd.concat([first, rows, last], ignore_index=True)


def _lines(step: Timeline, scale: _Scale) -> list[go.Scatter]:
    ranks = sorted(int(rank) for rank in step.memory["rank"].unique())
    colors = style.context_colors(np.linspace(0, 1, len(ranks)))
    traces = []
    for rank, color in zip(ranks, colors, strict=True):
        curve, name = _curve(step, rank), f"rank {rank}"
        words = f"<b>{name}</b> from %{{x:.6~g}} ms: %{{y:.5~g}} {scale.name}"
        also = "" if scale.column == "units" else ", %{customdata} units"
        traces.append(
            go.Scatter(
                name=name,
                legendgroup=name,
                x=curve["time_ms"],
                y=curve[scale.column] / scale.size,
                mode="lines",
                line={"shape": "hv", "color": color, "width": 2},
                customdata=curve["units"],
                hovertemplate=f"{words}{also}<extra></extra>",
            )
        )
    return traces


def _parts(step: Timeline, scale: _Scale, rank: int) -> list[go.Scatter]:
    curve, traces = _curve(step, rank), []
    for column, look in style.MEMORY.items():
        if not (curve[column] > 0).any():
            continue
        traces.append(
            go.Scatter(
                name=look.label,
                legendgroup=look.label,
                x=curve["time_ms"],
                y=curve[column] / scale.size,
                mode="lines",
                line={"shape": "hv", "color": look.color, "width": 0},
                fillcolor=look.color,
                stackgroup="parts",
                hovertemplate=f"<b>{look.label}</b> from %{{x:.6~g}} ms: %{{y:.5~g}} {scale.name}<extra></extra>",
            )
        )
    return traces


def _peak_text(step: Timeline, scale: _Scale, rank: int | None) -> str:
    peaks = step.memory.groupby("rank")[scale.column].max()
    where = int(peaks.index[int(np.argmax(peaks))]) if rank is None else rank
    return f"peak {scale.text(float(peaks[where]))} on rank {where}"


def _axis(scale: _Scale, steps: list[Timeline], cap_bytes: float | None, rank: int | None) -> dict[str, Any]:
    tables = [each.memory if rank is None else each.memory[each.memory["rank"] == rank] for each in steps]
    most = max([float(table[scale.column].max()) for table in tables] + ([cap_bytes] if cap_bytes is not None else []))
    return style.value_axis(scale.title, 0, 1.08 * most / scale.size) | {"nticks": 6}


def _cap(cap_bytes: float, scale: _Scale, axis: str) -> dict[str, Any]:
    label = {"text": f"cap {scale.text(cap_bytes)}", "textposition": "start", "yanchor": "bottom", "font": {"size": 12}}
    place = {"xref": f"x{axis} domain", "yref": f"y{axis}", "x0": 0, "x1": 1}
    value = cap_bytes / scale.size
    return {"type": "line", **place, "y0": value, "y1": value, "line": {"color": "#222222", "dash": "dash"}, "label": label}
