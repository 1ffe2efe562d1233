"""The rows of sweeps on disk: one JSON line a cell, appended as soon as it is known. Knows no settings."""

import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any

NUMBERS = ["makespan_ms", "bubble_fraction", "bubble_overhead", "tokens_per_second", "peak_in_flight"]
RESULTS = ["spec_hash", *NUMBERS, "source", "refused"]
Row = dict[str, Any]


class RowStore:
    """Rows by spec_hash, of this version of the package; others in the file are left alone."""

    def __init__(self, path: Path) -> None:
        self.path, self.version = path, metadata.version("terapipe")
        self.known: dict[str, Row] = {}
        text = path.read_text("utf-8", errors="replace") if path.exists() else ""  # a damaged line costs that line only
        self._is_torn = bool(text) and not text.endswith("\n")  # the writer was stopped in the middle of its last line
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            is_row = isinstance(row, dict) and isinstance(row.get("spec_hash"), str)
            if is_row and row.pop("version", None) == self.version:
                self.known[row["spec_hash"]] = {name: _from_json(name, value) for name, value in row.items()}

    def add(self, row: Row) -> None:
        """Keep a row, on disk at once."""
        self.known[row["spec_hash"]] = row
        values = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self._is_torn + json.dumps({"version": self.version, **values}) + "\n")
        self._is_torn = False


def refused_row(error: Exception, spec_hash: str) -> Row:
    """The row of a cell that cannot be: its reason, and no numbers."""
    return {"spec_hash": spec_hash, **dict.fromkeys(NUMBERS, math.nan), "source": "", "refused": str(error)}


def _from_json(name: str, value: Any) -> Any:
    return math.nan if value is None and name in NUMBERS else value
