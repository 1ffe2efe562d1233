"""Speed against memory: every schedule that was tried, and those that none beats."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import qualitative

from terapipe.errors import ScheduleError, as_number
from terapipe.plots import style

_COLUMNS = ["family", "slicing", "makespan_ms", "peak_bytes", "peak_activations"]
_PLOT_PX = 380
_DOMINATED = "#C9C9C9"


def pareto(table: pd.DataFrame, cap_bytes: float | None = None) -> go.Figure:
    """Makespan against peak memory over families and slicings; what another beats is grey.

    Parameters
    ----------
    table : DataFrame
        What `tp.best_schedule` returns, or several of those concatenated: family, slicing, makespan_ms,
        peak_bytes, peak_activations, and chunks_per_rank, options and extrapolated where they are.
    cap_bytes : float, optional
        A dashed line; needs bytes.

    Returns
    -------
    Figure
        A trace "beaten" (another is no worse in either and better in one), the line "beaten by none", and
        a trace a family of the points on it: x the peak of the rank with most, in bytes as the axis names
        them where every row knows its bytes, else in activations of a microbatch on one rank; y the makespan
        in ms.

    Raises
    ------
    ScheduleError
        For what is not such a table; for a cap where bytes are not known.

    Examples
    --------
    >>> import terapipe as tp
    >>> cost = tp.CallableCost(lambda l, c, b: 1 + l / 64, lambda l, c, b: 2 + l / 32)
    >>> found = tp.best_schedule(cost, 256, 2, 2, families=["1f1b", "terapipe"], max_slices=4)
    >>> [trace.name for trace in tp.plots.pareto(found).data]
    ['beaten', 'beaten by none', '1f1b', 'terapipe']
    """
    knows_bytes = _check(table, cap_bytes)
    peak = table["peak_bytes" if knows_bytes else "peak_activations"].to_numpy(np.float64)
    cap = as_number(cap_bytes) if cap_bytes is not None else 0.0
    unit, size = style.byte_unit(max(peak.max(), cap)) if knows_bytes else ("activations of a microbatch on one rank", 1.0)
    rows = table.assign(peak=peak / size).sort_values(["peak", "makespan_ms"], kind="stable")
    best = ~dominated(rows["peak"].to_numpy(), rows["makespan_ms"].to_numpy(np.float64))
    fig = go.Figure([_points(rows[~best], "beaten", _DOMINATED, 7, unit), _steps(rows[best])])
    colors = dict(zip(sorted(table["family"].unique()), qualitative.Dark24, strict=False))
    for name, each in rows[best].groupby("family", sort=False):
        fig.add_trace(_points(each, str(name), colors[name], 11, unit))
    high = 1.05 * max(rows["peak"].max(), cap / size)
    fig.update_xaxes(style.value_axis(f"peak of the rank with most ({unit})", 0, high))
    fig.update_yaxes(style.time_axis("makespan (ms)", rows["makespan_ms"].to_numpy(np.float64), wide=3))
    beyond = "extrapolated" in rows and bool(rows["extrapolated"].any())
    badge = style.badge("simulated, extrapolated" if beyond else "simulated", "")
    header = style.header([style.bold("Speed against memory"), f"{len(rows)} schedules, {int(best.sum())} beaten by none"], "")
    lines, labels = _cap_line(cap / size) if cap else ([], [])
    return style.finish(fig, _PLOT_PX, [header, badge, *labels]).update_layout(shapes=lines)


def _check(table: pd.DataFrame, cap_bytes: float | None) -> bool:
    """Refuse what is no table of schedules; say whether every row knows its bytes."""
    missing = [name for name in _COLUMNS if not isinstance(table, pd.DataFrame) or name not in table]
    if missing or table.empty:
        raise ScheduleError(
            f"not a table of schedules: it needs rows, and the column(s) {missing or _COLUMNS}; use tp.best_schedule."
        )
    knows_bytes = bool(table["peak_bytes"].notna().all())
    if cap_bytes is not None and not (knows_bytes and as_number(cap_bytes) > 0):
        raise ScheduleError(
            f"cap_bytes={cap_bytes!r}: needs a positive number, and a table with bytes (best_schedule(memory=…))."
        )
    return knows_bytes


def _cap_line(place: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    line = {"type": "line", "x0": place, "x1": place, "y0": 0, "y1": 1, "yref": "y domain"}
    look = {"dash": "dash", "color": "#222222", "width": 1.5}
    label = {"text": "cap", "x": place, "y": 1, "yref": "y domain", "xanchor": "left", "xshift": 4, "showarrow": False}
    return [line | {"line": look}], [label | {"yanchor": "top"}]


def dominated(peak: npt.NDArray[np.float64], makespan_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Whether another point is no worse in both and better in one; the points ascend by (peak, makespan)."""
    before = np.minimum.accumulate(np.append(np.inf, makespan_ms[:-1]))
    same = np.append(False, (np.diff(peak) == 0) & (np.diff(makespan_ms) == 0))
    worse: npt.NDArray[np.bool_] = makespan_ms >= before
    for index in np.flatnonzero(same):  # an equal point is as good as its twin
        worse[index] = worse[index - 1]
    return worse


def _points(rows: pd.DataFrame, name: str, color: str, size_px: int, unit: str) -> go.Scatter:
    return go.Scatter(
        name=name,
        x=rows["peak"],
        y=rows["makespan_ms"],
        mode="markers",
        marker={"color": color, "size": size_px, "line": {"color": "white", "width": 1}},
        customdata=np.array([_label(row) for row in rows.to_dict("records")], dtype=object),
        hovertemplate=f"%{{customdata}}<br>%{{y:.5~g}} ms, peak %{{x:.4~g}} {unit}<extra></extra>",
    )


def _steps(rows: pd.DataFrame) -> go.Scatter:
    look = {"color": "#888888", "width": 1.5, "shape": "hv"}
    return go.Scatter(name="beaten by none", x=rows["peak"], y=rows["makespan_ms"], mode="lines", line=look, hoverinfo="skip")


def _label(row: dict[Any, Any]) -> str:
    given = row.get("options")
    if isinstance(given, Mapping):
        options = "".join(f", {key}={value}" for key, value in given.items())
    else:  # of a table of one's own: text, or nothing
        options = f", {given}" if isinstance(given, str) and given else ""
    stages = f", {row['chunks_per_rank']} stages a rank" if row.get("chunks_per_rank", 1) != 1 else ""
    return f"<b>{row['family']}</b>{stages}{options}<br>{row['slicing']}"
