"""What the slicing DP trades: total time of the slices against waiting for the slowest, over t_max."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from terapipe.errors import SlicingError
from terapipe.plots import style

_COLUMNS = ["t_max_ms", "sum_ms", "waiting_ms", "latency_ms", "n_slices", "optimal"]
_PLOT_PX = 340
_WIDE = 8  # times that span more are drawn on logarithmic axes


def t_max(curve: pd.DataFrame) -> go.Figure:
    """The two terms of eq. (6) of TeraPipe (ICML 2021), S*(t_max) and (K−1)·t_max, and their sum.

    Parameters
    ----------
    curve : DataFrame
        What `tp.t_max_curve` returns: t_max_ms, sum_ms, waiting_ms, latency_ms, n_slices, optimal, and
        extrapolated, which a badge shows.

    Returns
    -------
    Figure
        Three lines over t_max in ms, and a marker at the optimum that states its t_max, latency and
        number of slices.

    Raises
    ------
    SlicingError
        For what is not such a table.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost = tp.CallableCost(lambda l, c, b: 1 + l, lambda l, c, b: 2 + 2 * l)
    >>> [trace.name for trace in tp.plots.t_max(tp.t_max_curve(cost, 64, 8)).data]
    ['S*(t_max)', '(K−1)·t_max, K = 8', 'their sum', 'least']
    """
    missing = [name for name in _COLUMNS if not isinstance(curve, pd.DataFrame) or name not in curve]
    if missing or curve.empty:
        raise SlicingError(
            f"not a curve over t_max: it needs rows, and the column(s) {missing or _COLUMNS}; use tp.t_max_curve."
        )
    rows = curve.sort_values("t_max_ms")
    names = {"sum_ms": "S*(t_max)", "waiting_ms": f"(K−1)·t_max, K = {_n_stages(rows)}", "latency_ms": "their sum"}
    fig = go.Figure([_line(rows, *each, color) for each, color in zip(names.items(), style.TERMS, strict=True)])
    best = rows[rows["optimal"].astype(bool)].head(1)
    if not best.empty:
        fig.add_trace(_marker(best))
    fig.update_xaxes(style.time_axis("t_max: longest slice time allowed (ms)", rows["t_max_ms"].to_numpy(np.float64), _WIDE))
    fig.update_yaxes(style.time_axis("time (ms)", rows[list(names)].to_numpy(np.float64), _WIDE))
    header = style.header([style.bold("Eq. (6): the least sum"), *_facts(best)], "")
    beyond = "extrapolated" in rows and bool(rows["extrapolated"].any())
    return style.finish(fig, _PLOT_PX, [header, *([style.badge("extrapolated cost", "")] if beyond else [])])


def _n_stages(rows: pd.DataFrame) -> int:
    """K, as the table has it in (K−1)·t_max."""
    last = rows.iloc[-1]
    return round(last["waiting_ms"] / last["t_max_ms"]) + 1 if last["t_max_ms"] > 0 else 1


def _line(rows: pd.DataFrame, column: str, name: str, color: str) -> go.Scatter:
    return go.Scatter(
        name=name,
        x=rows["t_max_ms"],
        y=rows[column],
        mode="lines",
        line={"color": color, "width": 3 if column == "latency_ms" else 2},
        customdata=rows[["n_slices"]],
        hovertemplate=f"<b>{name}</b> %{{y:.5~g}} ms<br>t_max %{{x:.4~g}} ms, %{{customdata[0]}} slices<extra></extra>",
    )


def _marker(best: pd.DataFrame) -> go.Scatter:
    look: dict[str, Any] = {"symbol": "star", "size": 15, "color": style.TERMS[-1], "line": {"color": "white", "width": 1}}
    return go.Scatter(
        name="least",
        x=best["t_max_ms"],
        y=best["latency_ms"],
        mode="markers",
        marker=look,
        hovertemplate="<br>".join(_facts(best)) + "<extra></extra>",
    )


def _facts(best: pd.DataFrame) -> list[str]:
    if best.empty:
        return []
    row = best.iloc[0]
    times = [
        f"{name} {style.duration_text(row[column])}" for name, column in (("t_max", "t_max_ms"), ("latency", "latency_ms"))
    ]
    n_slices = int(row["n_slices"])
    return [*times, f"{n_slices} slice{'' if n_slices == 1 else 's'}"]
