"""A directory that keeps one measurement, so that it can be continued: what it is of, and whose it may be.

Rows measured of another model, on another grid or machine must never be taken for more of the same.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from terapipe.engine.host import describe_host
from terapipe.errors import CostError

WHAT = "measured.json"


def claim(directory: Path, what: dict[str, Any]) -> None:
    """Make `directory` the place of a measurement, or check that it is.

    Raises
    ------
    CostError
        Where it holds another measurement, naming the first difference, or anything else.
    """
    host = describe_host()
    machine = {"host": host["host"], "processor": host["processor"], "torch": host["versions"]["torch"]}
    wanted = json.loads(json.dumps(what | {"machine": machine}))
    file = directory / WHAT
    if file.is_file():
        found = json.loads(file.read_text("utf-8"))
        for name, before, now in _differences(found, wanted):
            raise CostError(
                f"directory={str(directory)!r} holds another measurement: {name} is {before} there and {now} here. "
                "Choose another directory, or call with the same arguments."
            )
        return
    whole = directory / f"{WHAT}.new"  # renamed once it is written: a half-written one claims nothing
    if directory.exists() and (not directory.is_dir() or any(each != whole for each in directory.iterdir())):
        raise CostError(f"directory={str(directory)!r} holds something else than a profile's rows. Choose a new or empty one.")
    directory.mkdir(parents=True, exist_ok=True)
    whole.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    os.replace(whole, file)


def _differences(found: Any, wanted: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, before, now) of all that differs."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*found, *(key for key in wanted if key not in found)]:
            yield from _differences(found.get(key), wanted.get(key), f"{name}.{key}" if name else key)
    elif found != wanted:
        yield name, found, wanted
