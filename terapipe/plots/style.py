"""What all figures share: the colours and labels of kinds, budget parts and sources, and the white layout."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from terapipe.timeline import BUDGET

Colorscale = list[tuple[float, str]]


class KindStyle(NamedTuple):
    """How one kind of action is drawn: from `color` at its first slice to `pale` at its last."""

    label: str
    color: str
    pale: str

    @property
    def colorscale(self) -> Colorscale:
        """The shades, for tones from 0 to 1."""
        return [(0.0, self.color), (1.0, self.pale)]


class PartStyle(NamedTuple):
    """How one part of a sum is named and drawn."""

    label: str
    color: str


# Any two shades of two kinds are at least 21 CIELAB units apart for eyes without red or green cones
# (protanopia, deuteranopia), 16 for those without blue ones (Machado et al. 2009). `pale` is `color`
# with 40 % white.
KINDS = {
    "F": KindStyle("forward", "#0072B2", "#66AAD1"),
    "B": KindStyle("backward", "#D55E00", "#E69E66"),
    "I": KindStyle("input gradient", "#6B0F24", "#A66F7C"),
    "W": KindStyle("weight gradient", "#2ED3B7", "#82E5D4"),
}
IDLE = "#ECECEC"
PATH = "#111111"  # edges of the critical path's bars
# Time at work in blues and warm colours, idle time in greys.
_PART_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#6E6E6E", "#9C9C9C", "#CACACA", "#CC79A7", "#222222")
PARTS = dict(zip(BUDGET, _PART_COLORS, strict=True))
SOURCES = {
    "simulated": "#3B5B92",
    "emulated": "#7A4E9E",
    "measured": "#1E7B4F",
    "replayed": "#0B6B78",
    "fitted": "#8A4B14",
    "given": "#6B6B6B",
}
EXTRAPOLATED = "extrapolated"
WARNING = "#FFC20A"  # the one bright badge, with dark text: also apart from the others without any hue
# Parts of what a rank holds, the lowest first: what stays all the time in grey.
MEMORY = {
    "weight_bytes": PartStyle("weights", "#9C9C9C"),
    "activation_bytes": PartStyle("activations", "#0072B2"),
    "context_bytes": PartStyle("keys, values, their gradients", "#E69F00"),
    "queue_bytes": PartStyle("weight queue", "#2ED3B7"),
}
# Terms of a sum, and the sum.
TERMS = ("#0072B2", "#D55E00", "#222222")

BYTE_UNITS = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "bytes": 1.0}

BAR_GAP = 0.14
INSIDE = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "inside"}
FONT = "Open Sans, Arial, sans-serif"
WIDTH_PX = 900  # of the plot area on a usual screen: what decides whether a bar is wide enough for an edge
MAX_LABELLED = 2_000  # more texts than this make a browser crawl


def tones(
    place: npt.NDArray[np.int64], last: npt.NDArray[np.int64], microbatch: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Shades from 0 to 1: by slice within a microbatch; whole microbatches take turns."""
    ramp = place / np.maximum(last, 1)
    shades: npt.NDArray[np.float64] = np.where(last > 0, ramp, microbatch % 2)
    return shades


def byte_unit(most: float) -> tuple[str, float]:
    """The unit in which bytes up to `most` are read easily, and its size."""
    return next((name, size) for name, size in BYTE_UNITS.items() if most >= size or size == 1)


def duration_text(milliseconds: float) -> str:
    """Milliseconds to four digits, with their unit."""
    return f"{milliseconds:.4g} ms" if milliseconds < 1000 else f"{milliseconds:,.0f} ms"


def context_colors(shares: npt.ArrayLike) -> list[str]:
    """Colours of context lengths from none, 0, to the longest, 1: darker and darker, so in order for every eye."""
    colors: list[str] = sample_colorscale("Viridis", list(0.8 * (1 - np.asarray(shares, dtype=np.float64))))
    return colors


def context_colorscale() -> Colorscale:
    """`context_colors` for a colour axis."""
    shares = np.linspace(0, 1, 9)
    return list(zip(shares.tolist(), context_colors(shares), strict=True))


def badge(source: str, axis: str) -> dict[str, Any]:
    """The annotation that says where a panel's times come from; `axis` is "", "2", … as in "xaxis2".

    Its colour is that of the first word, or a warning where anything is extrapolated.
    """
    warns = EXTRAPOLATED in source
    color = WARNING if warns else SOURCES.get(source.split(",", maxsplit=1)[0], SOURCES["given"])
    return {
        **_above_panel(axis),
        "text": source,
        "x": 1,
        "xanchor": "right",
        "bgcolor": color,
        "borderpad": 3,
        "font": {"color": "#222222" if warns else "white", "size": 12},
        "name": "badge",
    }


def badge_beside(source: str, row: int) -> dict[str, Any]:
    """The badge right of a lane; `badge_margin_px` of such texts is the room they need."""
    return {**badge(source, ""), "yref": "y", "y": row, "yanchor": "middle", "yshift": 0, "xanchor": "left", "xshift": 8}


def badge_margin_px(sources: list[str]) -> float:
    """Right margin for badges beside lanes."""
    return max(100, 28 + 7 * max(map(len, sources), default=0))


def header(parts: list[str], axis: str) -> dict[str, Any]:
    """The annotation above a panel's left edge; empty parts are left out."""
    text = "  ·  ".join(part for part in parts if part)
    return {**_above_panel(axis), "text": text, "x": 0, "xanchor": "left", "align": "left", "name": "header"}


def bold(text: str | None) -> str:
    """Bold text, or nothing for none."""
    return f"<b>{text}</b>" if text else ""


def _above_panel(axis: str) -> dict[str, Any]:
    place = {"xref": f"x{axis} domain", "yref": f"y{axis} domain", "y": 1, "yanchor": "bottom", "yshift": 7}
    return {**place, "showarrow": False, "font": {"size": 13}}


def value_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """A horizontal linear axis. Plain numbers: an SI prefix on a tick would be read on top of the axis's unit."""
    plain = {"exponentformat": "none", "separatethousands": True, "gridcolor": "#DDDDDD", "zeroline": False}
    return {"type": "linear", "title": {"text": title, "font": {"size": 14}}, "range": [low, high], **plain}


def length_axis(title: str, shortest: float, longest: float) -> dict[str, Any]:
    """A logarithmic axis of slice lengths in tokens, with ticks at powers of two."""
    ticks = [2**power for power in range(64) if shortest <= 2**power <= longest]
    low, high = np.log10(max(shortest, 1)), np.log10(max(longest, 1))
    margin = 0.03 * (high - low) or 0.1
    look = {"gridcolor": "#DDDDDD", "zeroline": False, "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}
    return {"type": "log", "title": {"text": title, "font": {"size": 14}}, "range": [low - margin, high + margin], **look}


def time_axis(title: str, values: npt.NDArray[np.float64], wide: float) -> dict[str, Any]:
    """An axis around times that are not NaN: logarithmic where they are positive and span more than a factor of `wide`."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    look = {"title": {"text": title, "font": {"size": 14}}, "gridcolor": "#DDDDDD", "zeroline": False}
    if low <= 0 or high <= wide * low:
        return {"type": "linear", "range": [0, 1.05 * high or 1.0], "exponentformat": "none", "separatethousands": True, **look}
    first, last = np.log10([low, high])
    margin = 0.04 * (last - first)
    ticks = _log_ticks(low, high)
    text = {"tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}
    return {"type": "log", "range": [first - margin, last + margin], **text, **look}


def _log_ticks(low: float, high: float) -> list[float]:
    """At least three round numbers in a range, if it has any. Plotly's own between powers of ten are "2" and "5"."""
    powers = range(int(np.floor(np.log10(low))) - 1, int(np.ceil(np.log10(high))) + 1)
    ticks: list[float] = []
    for leading in ((1,), (1, 2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9), np.arange(10, 100) / 10):
        ticks = [float(digit) * 10.0**power for power in powers for digit in leading]
        if sum(low <= tick <= high for tick in ticks) >= 3:
            break
    return ticks


def lane_axis(title: str, labels: list[str]) -> dict[str, Any]:
    """A vertical axis of lanes 0, 1, …, the first on top."""
    n = len(labels)
    ticks = {"tickvals": list(range(n)), "ticktext": labels, "showgrid": False, "zeroline": False}
    return {"type": "linear", "title": {"text": title, "font": {"size": 14}}, "range": [n - 0.5, -0.5], **ticks}


def finish(
    fig: go.Figure, plot_px: float, annotations: list[dict[str, Any]], top_px: int = 74, bottom_px: int = 96
) -> go.Figure:
    """The shared layout around a plot area of a given height."""
    font = {"family": FONT, "size": 13, "color": "#222222"}
    legend = {"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0.5, "xanchor": "center"}
    return fig.update_layout(
        template="plotly_white",
        barmode="overlay",
        bargap=BAR_GAP,
        annotations=annotations,
        font=font,
        height=plot_px + top_px + bottom_px,
        margin={"l": 64, "r": 24, "t": top_px, "b": bottom_px, "pad": 4},
        hovermode="closest",
        hoverlabel={"align": "left", "font": {"family": FONT}},
        legend={**legend, "title": {"font": {**font, "size": 15}, "side": "left"}},
        uniformtext={"minsize": 9, "mode": "hide"},
    )
