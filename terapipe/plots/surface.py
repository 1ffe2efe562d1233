"""What a slice costs: time over slice length, a line a context length. Knows stages, no pipelines."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from terapipe.errors import CostError, check_integer, unknown_name
from terapipe.plots import style
from terapipe.plots.inputs import by_name
from terapipe.plots.origins import CostLike, DrawnCost, Floats, drawn_cost

Kind = Literal["step", "forward", "backward"]
_LABELS = {"step": "forward + backward", "forward": "forward", "backward": "backward"}
_PANEL_PX, _GAP_PX = 330, 100
_N_LENGTHS = 96  # along a line
_WIDE = 4  # times that span more are drawn on a logarithmic axis, as lengths are


class _View(NamedTuple):
    """Which time is drawn, and how far."""

    kind: Kind
    per_token: bool
    seq_tokens: int

    @property
    def unit(self) -> str:
        """Of the vertical axis."""
        return "ms per token" if self.per_token else "ms"

    def drawn(self, times_ms: Floats, slice_tokens: npt.NDArray[np.int64], n_sequences: int) -> Floats:
        """Times in that unit."""
        return times_ms / (slice_tokens * n_sequences) if self.per_token else times_ms


def cost_surface(
    cost: CostLike | Mapping[str, CostLike],
    seq_tokens: int | None = None,
    *,
    kind: Kind = "step",
    per_token: bool = False,
    context_tokens: Sequence[int] | None = None,
    n_sequences: int = 1,
) -> go.Figure:
    """Time of a slice on one stage against its length, one line for each of a few context lengths.

    Lines are what the cost model answers, dashed and badged where it extrapolates, absent where it
    refuses. Markers are a profile's medians, beside the lines of its fit, or a table's points. The
    badge says where the lines come from, the legend where the markers do.

    Parameters
    ----------
    cost : CostModel, Profile or {name: either}
        Each has a panel; the axes are the same.
    seq_tokens : int, optional
        Longest slice + context drawn; by default what a profile, table or model reaches.
    kind : "step" (forward + backward), "forward" or "backward"
    per_token : bool
        Milliseconds ÷ tokens of the slice in all its sequences, which shows the floor.
    context_tokens : list of int, optional
        By default none, a quarter, a half and three quarters of `seq_tokens`.
    n_sequences : int
        Sequences of the microbatch.

    Returns
    -------
    Figure
        For each panel and context a line (its `meta` is the context), then its extrapolated part;
        then markers, if there are points. `x` is the slice length in tokens, `y` ms, or ms per token.

    Raises
    ------
    CostError
        For what is not a cost, where `seq_tokens` is needed and not given, or nothing can be drawn.
    """
    if kind not in get_args(Kind):
        raise CostError(unknown_name("kind", kind, get_args(Kind)))
    check_integer("n_sequences", n_sequences, 1, CostError)
    panels = {name: drawn_cost(each, n_sequences) for name, each in by_name(cost).items()}
    if not panels:
        raise CostError("no cost given; a mapping needs at least one name.")
    view = _View(kind, per_token, _seq_tokens(panels, seq_tokens))
    contexts = _contexts(context_tokens, view.seq_tokens)
    return _draw(panels, [_traces(panel, view, contexts) for panel in panels.values()], view)


def _seq_tokens(panels: Mapping[str, DrawnCost], given: int | None) -> int:
    if given is not None:
        return check_integer("seq_tokens", given, 1, CostError)
    known = [panel.seq_tokens for panel in panels.values() if panel.seq_tokens is not None]
    if not known:
        raise CostError("seq_tokens is needed: a formula does not say how far it is meant to reach.")
    return max(known)


def _contexts(given: Sequence[int] | None, seq_tokens: int) -> list[int]:
    if given is None:
        return sorted({seq_tokens * quarter // 4 for quarter in range(4)})
    contexts = sorted({check_integer("context_tokens", each, 0, CostError) for each in given})
    if not contexts or contexts[-1] >= seq_tokens:
        raise CostError(f"context_tokens={list(given)}: needs one or more lengths below seq_tokens={seq_tokens}.")
    return contexts


def _traces(panel: DrawnCost, view: _View, contexts: list[int]) -> list[go.Scatter]:
    lines = [trace for context in contexts for trace in _lines(panel, view, context)]
    return lines if panel.points.empty else [*lines, _markers(panel, view)]


def _lines(panel: DrawnCost, view: _View, context: int) -> list[go.Scatter]:
    """The line of one context, and what of it is extrapolated, where anything is."""
    longest = view.seq_tokens - context
    even = np.rint(np.geomspace(1, longest, _N_LENGTHS)).astype(np.int64)
    lengths = np.union1d(even, panel.lengths[panel.lengths <= longest])
    times = view.drawn(panel.times_ms(view.kind, lengths, context), lengths, panel.n_sequences)
    beyond = panel.is_extrapolated(lengths, context) & np.isfinite(times)
    (color,) = style.context_colors([context / view.seq_tokens])
    look = {"x": lengths, "mode": "lines", "meta": context, "legendgroup": str(context)}
    words = f"<b>%{{x}} tokens after {context}</b><br>%{{y:.4~g}} {view.unit}"
    known = go.Scatter(
        **look,
        name=f"after {context} tokens" if context else "first slice",
        y=np.where(beyond, np.nan, times),
        line={"color": color, "width": 2},
        hovertemplate=f"{words}<extra></extra>",
    )
    if not beyond.any():
        return [known]
    # Up to its neighbours, so that the two parts meet.
    shown = beyond | np.append(beyond[1:], False) | np.append(False, beyond[:-1])
    dashed = go.Scatter(
        **look,
        name=style.EXTRAPOLATED,
        y=np.where(shown, times, np.nan),
        line={"color": color, "width": 2, "dash": "dash"},
        hovertemplate=f"{words}, {style.EXTRAPOLATED}<extra></extra>",
        showlegend=False,
    )
    return [known, dashed]


def _markers(panel: DrawnCost, view: _View) -> go.Scatter:
    points = panel.points[panel.points["slice_tokens"] + panel.points["context_tokens"] <= view.seq_tokens]
    columns = ["forward_ms", "backward_ms"] if view.kind == "step" else [f"{view.kind}_ms"]
    lengths, times = points["slice_tokens"].to_numpy(np.int64), points[columns].to_numpy(np.float64).sum(axis=1)
    colors = style.context_colors(points["context_tokens"] / view.seq_tokens)
    words = f"<b>%{{x}} tokens after %{{customdata[0]}}</b><br>%{{y:.4~g}} {view.unit}, {panel.origin_of_points}"
    return go.Scatter(
        name=panel.origin_of_points,
        x=lengths,
        y=view.drawn(times, lengths, panel.n_sequences),
        mode="markers",
        marker={"color": colors, "size": 8, "line": {"color": "white", "width": 1}},
        customdata=points[["context_tokens"]].to_numpy(),
        hovertemplate=f"{words}<extra></extra>",
    )


def _draw(panels: Mapping[str, DrawnCost], traces: list[list[go.Scatter]], view: _View) -> go.Figure:
    """Two panels a row on common axes."""
    n_columns = min(len(panels), 2)
    n_rows = -(-len(panels) // n_columns)
    plot_px = n_rows * _PANEL_PX + (n_rows - 1) * _GAP_PX
    spacing = {"vertical_spacing": _GAP_PX / plot_px if n_rows > 1 else 0, "horizontal_spacing": 0.09}
    fig = make_subplots(n_rows, n_columns, **spacing)
    x_axis, y_axis = _axes([trace for panel in traces for trace in panel], view)
    annotations: list[dict[str, Any]] = []
    for index, (name, panel) in enumerate(panels.items()):
        row, column = divmod(index, n_columns)
        axis = str(index + 1) if index else ""
        fig.add_traces(traces[index], rows=row + 1, cols=column + 1)
        fig.update_layout({f"xaxis{axis}": x_axis, f"yaxis{axis}": y_axis | ({"title": None} if column else {})})
        annotations += [style.header([style.bold(name or "Time of a slice")], axis), style.badge(panel.origin, axis)]
        annotations += _badge_over(traces[index], axis, y_axis["type"] == "log")
    listed: set[str] = set()
    for trace in fig.data:
        if trace.name in listed:
            trace.update(showlegend=False)
        listed.add(trace.name)
    return style.finish(fig, plot_px, annotations).update_layout(legend_traceorder="normal")


def _axes(traces: list[go.Scatter], view: _View) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of lengths and of times, around all that is drawn."""
    lengths, times = (np.concatenate([np.asarray(trace[name], dtype=np.float64) for trace in traces]) for name in "xy")
    drawn = np.isfinite(times)
    if not drawn.any():
        raise CostError("nothing to draw: the cost answers for no slice of these lengths and contexts.")
    x_axis = style.length_axis("slice length (tokens)", lengths[drawn].min(), view.seq_tokens)
    return x_axis, style.time_axis(f"{_LABELS[view.kind]} ({view.unit})", times[drawn], _WIDE)


def _badge_over(traces: list[go.Scatter], axis: str, is_log: bool) -> list[dict[str, Any]]:
    """The badge "extrapolated" over the middle of the highest dashed line; none where nothing is dashed."""
    dashed = [trace for trace in traces if trace.line.dash == "dash"]
    if not dashed:
        return []
    highest = max(dashed, key=lambda trace: np.nanmax(trace.y))
    where: npt.NDArray[np.int64] = np.flatnonzero(np.isfinite(highest.y))
    middle = where[len(where) // 2]
    y: Floats = np.log10(highest.y[middle]) if is_log else highest.y[middle]
    place = {
        "xref": f"x{axis}",
        "yref": f"y{axis}",
        "x": np.log10(highest.x[middle]),
        "y": y,
        "xanchor": "center",
        "yshift": 14,
    }
    return [{**style.badge(style.EXTRAPOLATED, axis), **place}]
