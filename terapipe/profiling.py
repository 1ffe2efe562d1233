"""Measures what slices cost: plans a grid of (slice, context) points and has the ranks time them."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from terapipe.config import ModelConfig
from terapipe.cost import Profile
from terapipe.engine.host import describe_host, steal_ms
from terapipe.engine.launch import Ranks
from terapipe.engine.probe import PROBE, Point
from terapipe.engine.results import new_directory, prepare
from terapipe.engine.worker import N_THREADS
from terapipe.errors import CostError
from terapipe.slicing import uniform_slicing
from terapipe.spec import RunSpec


def profile(
    model: ModelConfig,
    seq_tokens: int | None = None,
    n_ranks: int = 2,
    slice_tokens: Sequence[int] | None = None,
    n_sequences: int = 1,
    n_repeats: int = 5,
    dtype: Literal["float32", "float64"] = "float32",
    layers_per_stage: Sequence[int] | None = None,
    stage: str | type | None = None,
) -> Profile:
    """Measure the slices of every stage: alone, and on all ranks at once.

    Parameters
    ----------
    model : ModelConfig
        Cut into one stage a rank.
    seq_tokens : int, optional
        Longest sequence; default: the model's.
    slice_tokens : list of int, optional
        Lengths to measure; default: six from 1/16 of the sequence to all of it. Each is
        measured alone, and behind contexts of a half and all of what is left.
    n_sequences, n_repeats : int
        Sequences in the microbatch; repeats of each point after one that is not counted;
        a repeat goes over the whole grid, so that a machine whose speed wanders slows all points alike.
    dtype, layers_per_stage, stage
        As in `RunSpec`.

    Returns
    -------
    Profile
        `.contention` comes from the points measured on all ranks at once.
    """
    seq_tokens = model.max_seq_tokens if seq_tokens is None else seq_tokens
    spec = RunSpec(
        model,
        uniform_slicing(seq_tokens, 1, n_sequences=n_sequences),
        n_ranks=n_ranks,
        dtype=dtype,
        layers_per_stage=layers_per_stage,
        stage=stage,
    )
    points = plan_points(seq_tokens, slice_tokens, n_sequences)
    with tempfile.TemporaryDirectory(prefix="terapipe-profile-") as root, Ranks(n_ranks, Path(root)) as ranks:
        return measure(ranks, spec, points, n_repeats, Path(root))


def plan_points(seq_tokens: int, slice_tokens: Sequence[int] | None = None, n_sequences: int = 1) -> list[Point]:
    """The grid: each length alone, and behind contexts of a half and all of the tokens left."""
    if slice_tokens is None:
        shares = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 1 / 2, 1)
        slice_tokens = [max(1, round(seq_tokens * share)) for share in shares]
    lengths = sorted(set(slice_tokens))
    if not lengths or lengths[0] < 1 or lengths[-1] > seq_tokens:
        raise CostError(f"slice_tokens={list(slice_tokens)}: needs lengths from 1 to seq_tokens={seq_tokens}.")
    points = {(length, round((seq_tokens - length) * share)) for length in lengths for share in (0, 1 / 2, 1)}
    return [(length, context, n_sequences) for length, context in sorted(points)]


def measure(ranks: Ranks, spec: RunSpec, points: Sequence[Point], n_repeats: int, scratch: Path) -> Profile:
    """Measure points on ranks that are already running."""
    probe = plan_probe(spec, points, scratch)
    ranks.train([], [PROBE] * n_repeats, probe=probe)
    return read_probe(probe, spec)


def plan_probe(spec: RunSpec, points: Sequence[Point], scratch: Path) -> dict[str, Any]:
    """What the ranks need to know to measure points, alone and some on all ranks at once."""
    directory = prepare(spec, new_directory("profile", scratch))
    return {"directory": str(directory), "alone": list(points), "together": _spread(points), "steal_ms": steal_ms()}


def read_probe(probe: dict[str, Any], spec: RunSpec) -> Profile:
    """The profile that the ranks have measured."""
    files = sorted(Path(probe["directory"]).glob("probe-rank-*.csv"))
    about = {
        "model": spec.model.to_dict(),
        "layers": [[layers.start, layers.stop] for layers in spec.layer_ranges],
        "dtype": spec.dtype,
        "n_ranks": spec.n_ranks,
        "threads_per_rank": N_THREADS,
        "steal_ms": steal_ms() - probe["steal_ms"],
        "host": describe_host(),
    }
    return Profile(pd.concat([pd.read_csv(file) for file in files], ignore_index=True), about)


def _spread(points: Sequence[Point], n_points: int = 6) -> list[Point]:
    """A few points over the whole range of the grid, for contention."""
    if len(points) <= n_points:
        return list(points)
    return [points[index] for index in np.unique(np.linspace(0, len(points) - 1, n_points).round().astype(int))]
