"""How well eq. (9) predicts slices that it was not fitted to, against the noise of measuring them."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from terapipe.cost import Profile
from terapipe.errors import CostError
from terapipe.plots import style
from terapipe.plots.origins import repeats_text

_PLOT_PX = 330
_KINDS = ("forward", "backward")


def residuals(profile: Profile, stage: int | None = None) -> go.Figure:
    """Relative error of the fit at points it has not seen, against slice length; forward left, backward right.

    The shaded band is the noise of repeats: half the interquartile range over the median, of the
    points of a length. Errors inside it say little about the fit.

    Parameters
    ----------
    profile : Profile
        Its `held_out_points` are drawn.
    stage : int, optional
        By default the mean over stages.

    Returns
    -------
    Figure
        For each panel the band, then one marker a point: `x` the slice length in tokens, `y`
        predicted ÷ measured − 1, its colour the context length in tokens.

    Raises
    ------
    CostError
        For what is not a profile, or one that cannot be fitted.
    """
    if not isinstance(profile, Profile):
        raise CostError(f"{profile!r} is not a profile; tp.profile(…) measures one, tp.Profile.load(path) reads one.")
    points = profile.held_out_points(stage)
    points = points.assign(signed=points["predicted_ms"] / points["measured_ms"] - 1)
    fig = make_subplots(1, 2, shared_yaxes="all", horizontal_spacing=0.06)
    annotations = []
    for column, kind in enumerate(_KINDS, start=1):
        rows = points[points["kind"] == kind]
        fig.add_traces([_band(rows, column == 1), _markers(rows)], rows=1, cols=column)
        annotations.append(style.header([_facts(kind, rows)], "" if column == 1 else str(column)))
    lengths = points["slice_tokens"]
    fig.update_xaxes(style.length_axis("slice length (tokens)", lengths.min(), lengths.max()))
    fig.update_yaxes(tickformat="+.0%", zeroline=True, zerolinecolor="#222222", zerolinewidth=1, gridcolor="#DDDDDD")
    fig.update_yaxes(title={"text": "predicted ÷ measured − 1", "font": {"size": 14}}, col=1)
    annotations.append({**style.badge(f"measured, {repeats_text(profile, stage)}", "2"), "yshift": 26})
    style.finish(fig, _PLOT_PX, annotations, top_px=92)
    bar = {"title": {"text": "context<br>(tokens)", "font": {"size": 13}}, "thickness": 12, "outlinewidth": 0}
    scale = {"colorscale": style.context_colorscale(), "cmin": 0, "cmax": points["context_tokens"].max(), "colorbar": bar}
    return fig.update_layout(coloraxis=scale)


def _band(rows: pd.DataFrame, is_listed: bool) -> go.Scatter:
    """Plus and minus the noise at each length, a little wider than the outermost points."""
    noise = rows.groupby("slice_tokens")["noise"].median()
    lengths = noise.index.to_numpy(np.float64)
    lengths[0], lengths[-1] = 0.9 * lengths[0], 1.1 * lengths[-1]
    if len(lengths) == 1:
        lengths, noise = np.array([0.9, 1.1]) * rows["slice_tokens"].iloc[0], pd.concat([noise, noise])
    heights = noise.to_numpy(np.float64)
    return go.Scatter(
        name="noise of repeats",
        x=np.concatenate([lengths, lengths[::-1]]),
        y=np.concatenate([heights, -heights[::-1]]),
        fill="toself",
        fillcolor="rgba(110, 110, 110, 0.18)",  # the line of no error shows through
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=is_listed,
    )


def _markers(rows: pd.DataFrame) -> go.Scatter:
    marker: dict[str, Any] = {"color": rows["context_tokens"].to_numpy(), "coloraxis": "coloraxis", "size": 9}
    lines = [
        "<b>%{x} tokens after %{customdata[0]}</b>",
        "measured %{customdata[1]:.4~g} ms, predicted %{customdata[2]:.4~g} ms: %{y:+.1%}",
        "noise %{customdata[3]:.1%}<extra></extra>",
    ]
    return go.Scatter(
        x=rows["slice_tokens"].to_numpy(),
        y=rows["signed"].to_numpy(np.float64),
        mode="markers",
        marker={**marker, "line": {"color": "white", "width": 1}},
        customdata=rows[["context_tokens", "measured_ms", "predicted_ms", "noise"]].to_numpy(np.float64),
        hovertemplate="<br>".join(lines),
        showlegend=False,
    )


def _facts(kind: str, rows: pd.DataFrame) -> str:
    size = rows["signed"].abs()
    error = f"held-out error: median {size.median():.1%}, 95% of points below {size.quantile(0.95):.1%}"
    return f"{style.bold(kind)}<br>{error}"
