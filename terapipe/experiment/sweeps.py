"""Sweeps: every combination of some settings, simulated or run, as one table that is kept on disk.

A cell is known by what decides its result, hashed. Its row is written as soon as it is known, so that
an interrupted sweep goes on where it stopped, and a wider one starts from what an earlier one found.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from terapipe.cost import CostModel, Link
from terapipe.errors import SpecError, TerapipeError, check_keys, unknown_name
from terapipe.experiment.cells import RunCell, SimulationCell, hash_of
from terapipe.experiment.rows import RESULTS, Row, RowStore, refused_row
from terapipe.schedule import FAMILIES, Schedule
from terapipe.slicing import Slicing
from terapipe.spec import RunSpec

DEFAULT_DIRECTORY = Path("runs/sweeps")
SIMULATE_KEYS = [field.name for field in fields(SimulationCell)]
RUN_KEYS = [field.name for field in fields(RunSpec) if field.name != "directory"]  # a sweep makes its runs' folders
UNIFORM_KEYS = ["seq_tokens", "n_slices", "n_microbatches", "n_sequences"]
Labelled = tuple[Any, Any]  # what the table shows, and the value


def sweep(
    grid: Mapping[str, Any],
    how: Literal["simulate", "run"] = "simulate",
    directory: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Simulate or run every combination of some settings; a row each, the last key's values fastest.

    Parameters
    ----------
    grid : {key: value, list of values, or {label: value}}
        Labels stand in the table for what has no short text, such as a cost model. A value that is
        itself a list stands in a list: layers_per_stage=[[1, 3]]. Arrays, ranges, sets and
        generators are lists of values too.
        "simulate": cost (CostModel, or a list of one a stage), n_ranks, schedule (family or
        Schedule; default "terapipe"), slicing, or seq_tokens with n_slices, n_microbatches and
        n_sequences for equal slices, chunks_per_rank, link, bytes_per_token, contention.
        A cost is of one stage, whatever the number of stages: more of them are a deeper model.
        "run": the fields of `RunSpec`.
    how : "simulate" or "run"
        Runs of a sweep are launched one after another; to compare them, `race` them.
    directory : path, optional
        Where rows are kept and found again, default "runs/sweeps"; runs get a folder each there.
    progress : bool
        Whether to show a bar.

    Returns
    -------
    DataFrame
        The grid's keys, then spec_hash (of all that decides the result; of costs what they say of
        the slices visited), makespan_ms, bubble_fraction, bubble_overhead, tokens_per_second,
        peak_in_flight (units, of the rank with most), source ("simulated", "simulated,
        extrapolated", "emulated", "emulated, extrapolated" or "measured"), refused ("", or why the
        cell cannot be: its numbers are NaN), and directory (of a run). `frame.attrs["n_cached"]`: rows found on disk.

    Raises
    ------
    SpecError
        For a grid with unknown, missing or conflicting keys, or without values; for one CostModel over
        different numbers of stages a rank, which are models of different depth (see `StageShare`).
    RunError
        Where a rank fails; the rows before it are kept.

    Examples
    --------
    >>> import tempfile, terapipe as tp
    >>> cost = tp.CallableCost(lambda l, c, b: 1.0 + l, lambda l, c, b: 2.0 + 2 * l)
    >>> grid = {"n_ranks": 4, "schedule": ["terapipe", "1f1b"], "seq_tokens": 16, "n_slices": [1, 4], "cost": cost}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     frame = tp.sweep(grid, directory=folder, progress=False)
    >>> frame[["schedule", "n_slices", "makespan_ms"]]
       schedule  n_slices  makespan_ms
    0  terapipe         1        204.0
    1  terapipe         4        105.0
    2      1f1b         1        204.0
    3      1f1b         4          NaN
    """
    if how not in ("simulate", "run"):
        raise SpecError(unknown_name("way to sweep", how, ("simulate", "run")))
    if not isinstance(grid, Mapping):
        raise SpecError(f"grid={grid!r}: needs {{key: value or list of values}}, e.g. {{'n_ranks': [4, 8], 'cost': cost, …}}.")
    values = {key: _labelled(key, value) for key, value in grid.items()}
    _check_grid(values, how)
    root = Path(directory) if directory is not None else DEFAULT_DIRECTORY
    store, rows, n_cached = RowStore(root / "rows.jsonl"), [], 0
    cells = list(product(*values.values()))
    for cell in tqdm(cells, unit="cell", delay=1, leave=False, disable=not progress):
        labels = {key: label for key, (label, _) in zip(values, cell, strict=True)}
        settings = {key: value for key, (_, value) in zip(values, cell, strict=True)}
        row, is_cached = _result(settings, hash_of(labels), how, root, store)
        rows.append(labels | row)
        n_cached += is_cached
    columns = [*values, *RESULTS, *(["directory"] if how == "run" else [])]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["n_cached"] = n_cached
    return frame


def _result(settings: dict[str, Any], label_hash: str, how: str, root: Path, store: RowStore) -> tuple[Row, bool]:
    """A cell's row, and whether it was known; a cell that cannot even be described goes by its labels."""
    spec_hash, is_described = label_hash, False
    try:
        cell = SimulationCell(**settings) if how == "simulate" else RunCell(**settings)
        spec_hash, is_described = hash_of(cell.describe()), True
        if spec_hash in store.known:
            return store.known[spec_hash], True
        row = cell.measure(spec_hash, root)
    except TerapipeError as error:
        if not isinstance(error, ValueError):  # what happens to a running rank is no refusal
            raise
        row = refused_row(error, spec_hash)
    if is_described:
        store.add(row)
    return row, False


def _check_grid(values: Mapping[str, list[Labelled]], how: str) -> None:
    """Refuse what no cell could be made of."""
    if how == "run":
        check_keys("sweep of runs", values, RUN_KEYS, SpecError)
        needed = ["model", "slicing"]
    else:
        check_keys("sweep", values, SIMULATE_KEYS, SpecError)
        is_built = all(isinstance(value, Schedule) for _, value in values.get("schedule", [(None, None)]))
        needed = ["cost", *([] if is_built else ["n_ranks"])]
        if not is_built and "slicing" not in values:
            needed.append("seq_tokens")
    missing = [key for key in needed if key not in values]
    if missing:
        hint = " (or a slicing)" if "seq_tokens" in missing else ""
        raise SpecError(f"a sweep needs {', '.join(missing)}{hint}; given: {', '.join(values) or 'nothing'}.")
    uniform = [key for key in UNIFORM_KEYS if key in values]
    if "slicing" in values and uniform:
        raise SpecError(f"a sweep of slicing and {', '.join(uniform)}: those are for equal slices. Give one or the other.")
    for _, value in values.get("cost", []):
        given = value if isinstance(value, list | tuple) else [value]
        if how == "simulate" and not all(isinstance(each, CostModel) for each in given):
            raise SpecError(f"cost={value!r}: needs a CostModel, or a list with one for each stage.")
    if how == "simulate" and any(isinstance(value, CostModel) for _, value in values["cost"]):
        _check_stages(values)


def _check_stages(values: Mapping[str, list[Labelled]]) -> None:
    """Refuse one cost of a stage over cells of different numbers of stages a rank: their models are not the same."""
    asked = [value for _, value in values.get("chunks_per_rank", [(None, None)])]
    found: dict[int, str] = {}
    for label, schedule in values.get("schedule", [("terapipe", "terapipe")]):
        for n_stages in asked:
            count = _stages_per_rank(schedule, n_stages)
            if count:
                found.setdefault(count, str(label))
    if len(found) > 1:
        named = ", ".join(f"{count} ({label})" for count, label in sorted(found.items()))
        raise SpecError(
            f"one cost for different numbers of stages a rank, {named}: a cost is of one stage, so that these would be models "
            f"of different depth. Sweep each number apart, with cost=StageShare(cost, {max(found)}) for {max(found)} stages a "
            "rank where cost is of all layers of a rank (pandas.concat joins the tables); or give a list of one cost a stage; "
            "or use tp.best_schedule."
        )


def _stages_per_rank(schedule: Any, asked: Any) -> int:
    """Stages a rank of a cell; 0 where the cell cannot be, which its row says."""
    if isinstance(schedule, Schedule):
        return schedule.chunks_per_rank if asked in (None, schedule.chunks_per_rank) else 0
    family = FAMILIES.get(schedule) if isinstance(schedule, str) else None
    if family is None or not (asked is None or type(asked) is int):
        return 0
    return family.chunks if asked is None else asked if family.any_chunks or asked == family.chunks else 0


def _labelled(key: str, given: Any) -> list[Labelled]:
    """The values of a key with what the table shows of them."""
    if isinstance(given, Mapping) and all(isinstance(label, str) for label in given):
        pairs = [(label, _plain(value)) for label, value in given.items()]
    else:
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping) and not _is_scalar(given)
        pairs = [(_text(value), _plain(value)) for value in map(_plain, given if several else [given])]
    if not pairs:
        raise SpecError(f"{key}={given!r}: a sweep needs at least one value of each key.")
    shown = [label for label, _ in pairs]
    if len(set(shown)) < len(shown):
        pairs = [(f"{label} {index}" if shown.count(label) > 1 else label, value) for index, (label, value) in enumerate(pairs)]
    return pairs


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python, which JSON knows."""
    return value.item() if _is_scalar(value) else value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, np.generic | np.ndarray) and value.ndim == 0


def _text(value: Any) -> Any:
    """A plain value as it is, anything else as a short text."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Slicing | Link | Path):
        return str(value)
    if isinstance(value, list | tuple) and all(isinstance(each, str | int | float) for each in value):
        return str(list(value))
    return value.name if isinstance(value, Schedule) else type(value).__name__
