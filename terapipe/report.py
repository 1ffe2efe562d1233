"""A report: headings, sentences, tables and figures in one HTML file that needs nothing else."""

import html
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

_STYLE = """
body { font-family: system-ui, sans-serif; color: #222; line-height: 1.45; }
body { max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: 0.25rem 1.2rem 0.25rem 0; border-bottom: 1px solid #ddd; }
"""


@dataclass(frozen=True)
class Section:
    """A heading, a sentence or two, and a table or a figure."""

    title: str
    text: str
    content: pd.DataFrame | go.Figure


def write_report(path: Path, title: str, sections: list[Section]) -> Path:
    """Write the sections as one HTML file; plotly's script is inside it, once."""
    parts = [f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"]
    parts.append(f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>")
    has_script = False
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>")
        if isinstance(section.content, pd.DataFrame):
            parts.append(section.content.to_html(index=False, border=0))
            continue
        # plotly's buttons would cover the badge; zooming works by dragging.
        config = {"displayModeBar": False}
        parts.append(section.content.to_html(full_html=False, include_plotlyjs=not has_script, config=config))
        has_script = True
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</body></html>\n"]), encoding="utf-8")
    return path
