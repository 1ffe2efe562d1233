"""Figures as files: web pages and JSON by plotly alone, pictures by kaleido, which needs a browser.

The browser is looked for before kaleido starts: on its own, kaleido can search and wait for minutes.
"""

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
from plotly.basedatatypes import BaseFigure

from terapipe.errors import ExportError, unknown_name

_PICTURES = (".png", ".svg", ".pdf")
_WIDTH_PX = 1000
_PROGRAMS = ("chromium", "google-chrome", "chrome", "chromium-browser", "google-chrome-stable", "microsoft-edge", "msedge")
_MAC_PLACES = tuple(
    f"/Applications/{name}.app/Contents/MacOS/{name}" for name in ("Google Chrome", "Chromium", "Microsoft Edge")
)
_WINDOWS_FOLDERS = ("PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA")
_WINDOWS_PLACES = (r"Google\Chrome\Application\chrome.exe", r"Microsoft\Edge\Application\msedge.exe")


def save(fig: go.Figure, path: str | Path) -> Path:
    """Write a figure: .html (complete in one file), .json, or a picture (.png, .svg, .pdf).

    Parameters
    ----------
    fig : Figure
        Any plotly figure.
    path : str or Path
        Its suffix chooses the format; missing folders are made.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    ExportError
        For another suffix, and for a picture where kaleido or a browser is missing or fails.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    writers: dict[str, Callable[[go.Figure, Path], None]] = {
        ".html": _write_html,
        ".json": _write_json,
        **dict.fromkeys(_PICTURES, _write_picture),
    }
    if suffix not in writers:
        raise ExportError(f"{str(path)!r}: {unknown_name('suffix', suffix, writers)}")
    if not isinstance(fig, BaseFigure):
        raise ExportError(f"{fig!r} is not a plotly figure; save takes what tp.plots.timeline and the others return.")
    path.parent.mkdir(parents=True, exist_ok=True)
    writers[suffix](fig, path)
    return path


def find_browser() -> str | None:
    """Program file of a browser that kaleido can use, None where there is none.

    The environment variable BROWSER_PATH goes first and alone, as in kaleido; then what is on PATH,
    then the usual places of macOS and Windows.
    """
    chosen = os.environ.get("BROWSER_PATH")
    candidates = (chosen,) if chosen else (*_PROGRAMS, *_usual_places())
    found = (shutil.which(candidate) for candidate in candidates)
    return next((program for program in found if program), None)


def _usual_places() -> tuple[str, ...]:
    if sys.platform == "darwin":
        return _MAC_PLACES
    if sys.platform == "win32":
        folders = [os.environ[name] for name in _WINDOWS_FOLDERS if name in os.environ]
        return tuple(str(Path(folder, place)) for folder in folders for place in _WINDOWS_PLACES)
    return ()


def _write_html(fig: go.Figure, path: Path) -> None:
    fig.write_html(path, include_plotlyjs=True)


def _write_json(fig: go.Figure, path: Path) -> None:
    path.write_text(fig.to_json(), encoding="utf-8")


def _write_picture(fig: go.Figure, path: Path) -> None:
    browser = find_browser()
    if importlib.util.find_spec("kaleido") is None:
        raise _cannot_draw(path, "the package kaleido is not installed")
    if browser is None:
        chosen = os.environ.get("BROWSER_PATH")
        raise _cannot_draw(path, f"BROWSER_PATH={chosen!r} is not a program" if chosen else "no Chrome or Chromium was found")
    options = {
        "format": path.suffix.lower()[1:],
        "width": fig.layout.width or _WIDTH_PX,
        "height": fig.layout.height or _WIDTH_PX // 2,
        "scale": 2 if path.suffix.lower() == ".png" else 1,
    }
    # MathJax would be fetched from the web; kaleido starts the browser without a sandbox, so root may.
    browser_options = {"path": browser, "mathjax": False}
    try:
        picture: bytes = importlib.import_module("kaleido").calc_fig_sync(fig.to_dict(), opts=options, kopts=browser_options)
    except Exception as error:  # kaleido and its browser driver raise many kinds
        raise _cannot_draw(path, f"{browser} failed: {type(error).__name__}: {error}") from error
    path.write_bytes(picture)


def _cannot_draw(path: Path, reason: str) -> ExportError:
    return ExportError(
        f"cannot write {str(path)!r}: {reason}. Either install what pictures need, "
        '`pip install "terapipe[export]"` and a browser such as Debian\'s `chromium` (or name one in BROWSER_PATH), '
        f"or save a page that needs neither: {str(path.with_suffix('.html'))!r}."
    )
