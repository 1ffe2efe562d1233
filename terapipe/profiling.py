"""Measures what slices cost: plans a grid of (slice, context) points and has ranks time them until it is settled."""

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from terapipe.config import ModelConfig
from terapipe.cost import Profile
from terapipe.engine.claim import claim
from terapipe.engine.clock import check_device
from terapipe.engine.host import describe_host, steal_ms
from terapipe.engine.launch import Ranks
from terapipe.engine.probe import Point
from terapipe.engine.results import new_directory, prepare
from terapipe.engine.worker import N_THREADS
from terapipe.errors import CostError, as_number, check_integer
from terapipe.slicing import uniform_slicing
from terapipe.spec import RunSpec

TOLERANCE = 0.03
# Slice lengths as shares of the sequence. A profile of its own is for any plan, so it reaches shorter slices.
COARSE = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 1 / 2, 1)
FINE = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)


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
    *,
    n_stages: int | None = None,
    max_repeats: int | None = None,
    tolerance: float = TOLERANCE,
    device: Literal["cpu", "cuda"] = "cpu",
    split_backward: bool = False,
    directory: str | Path | None = None,
) -> Profile:
    """Measure the slices of every stage: alone, and some on all ranks at once.

    Parameters
    ----------
    model : ModelConfig
        Cut into `n_stages` stages.
    seq_tokens : int, optional
        Longest sequence; default: the model's.
    n_ranks : int
        Processes that measure. One is enough, on one device: it measures every stage, but not what
        ranks cost each other (`Profile.contention`).
    slice_tokens : list of int, optional
        Lengths to measure; default: ten from 1/32 of the sequence to all of it. Each is measured
        alone, and behind contexts of a half and all of what is left.
    n_sequences : int
        Sequences in the microbatch.
    n_repeats, max_repeats, tolerance : int, int, float
        Every point is measured `n_repeats` times at least, after one time that is not counted, and
        until the relative standard error of the median is at most `tolerance` for 9 of 10 points,
        or up to `max_repeats` times (default: 3 · n_repeats). A repeat goes over the whole grid, so
        that a machine whose speed wanders slows all points alike.
    dtype, layers_per_stage, stage
        As in `RunSpec`.
    n_stages : int, optional
        A multiple of `n_ranks`, its default; a rank holds all of its stages at once.
    device : "cpu" or "cuda"
        Rank r gets CUDA device r, whose own events time the slices.
    split_backward : bool
        Also time the halves of the backward, I and W, that zero-bubble schedules run apart. It
        doubles the measurement; without, costs say that each is half of the backward.
    directory : path, optional
        Keeps every row as it is measured. The same call later, also after an interruption, goes on
        from what is there; another model or grid is refused.

    Returns
    -------
    Profile
        `.about` says how often points were measured, and whether they settled.

    Raises
    ------
    CostError, SpecError, ConfigError
        Before any process starts, with the value, what is allowed and what to do.
    """
    seq_tokens = model.max_seq_tokens if seq_tokens is None else seq_tokens
    n_stages = _count_stages(n_ranks, n_stages)
    spec = RunSpec(
        model,
        uniform_slicing(seq_tokens, 1, n_sequences=n_sequences),
        n_ranks=n_stages,  # describes the stages as a pipeline of their own, whoever measures them
        dtype=dtype,
        layers_per_stage=layers_per_stage,
        stage=stage,
    )
    check_device(device, n_ranks)
    limits = _check_limits(n_repeats, max_repeats, tolerance)
    points = plan_points(seq_tokens, _lengths(seq_tokens, FINE) if slice_tokens is None else slice_tokens, n_sequences)
    with _home(directory) as root:
        if directory is not None:
            halves = {"split_backward": True} if split_backward else {}  # named only where asked for: older claims hold
            claim(root, {"n_ranks": n_ranks, "device": device, "points": points, "spec": json.loads(spec.to_json())} | halves)
        probe = _describe(spec, points, prepare(spec, root), split_backward) | {"n_ranks": n_ranks, "device": device} | limits
        with Ranks(n_ranks, root) as ranks:
            return _settle(ranks, spec, probe if n_ranks > 1 else probe | {"together": []})


def plan_points(
    seq_tokens: int, slice_tokens: Sequence[int] | None = None, n_sequences: int = 1, shortest_tokens: int | None = None
) -> list[Point]:
    """The grid: each length alone, and behind contexts of a half and all of the tokens left.

    Six lengths from 1/16 of the sequence to all of it, unless others are given, and the shortest to know.
    """
    lengths = sorted(
        {*(_lengths(seq_tokens, COARSE) if slice_tokens is None else slice_tokens), *filter(None, [shortest_tokens])}
    )
    if not lengths or lengths[0] < 1 or lengths[-1] > seq_tokens:
        raise CostError(f"slice_tokens={list(slice_tokens or [])}: needs lengths from 1 to seq_tokens={seq_tokens}.")
    points = {(length, round((seq_tokens - length) * share)) for length in lengths for share in (0, 1 / 2, 1)}
    return [(length, context, n_sequences) for length, context in sorted(points)]


def measure(
    ranks: Ranks, spec: RunSpec, points: Sequence[Point], n_repeats: int, scratch: Path, split_backward: bool = False
) -> Profile:
    """Measure points on ranks that are already running, each `n_repeats` times."""
    limits = {"n_repeats": n_repeats, "max_repeats": n_repeats, "tolerance": TOLERANCE}
    return _settle(ranks, spec, plan_probe(spec, points, scratch, split_backward) | limits)


def plan_probe(spec: RunSpec, points: Sequence[Point], scratch: Path, split_backward: bool = False) -> dict[str, Any]:
    """What a spec's ranks need to know to measure points, alone and some on all ranks at once."""
    return _describe(spec, points, prepare(spec, new_directory("profile", scratch)), split_backward)


def read_probe(probe: dict[str, Any], spec: RunSpec) -> Profile:
    """The profile that the ranks have measured."""
    files = sorted(Path(probe["directory"]).glob("probe-rank-*.csv"))
    about = {
        "model": spec.model.to_dict(),
        "layers": [[layers.start, layers.stop] for layers in spec.layer_ranges],
        "dtype": spec.dtype,
        "n_ranks": probe["n_ranks"],
        "device": probe["device"],
        "threads_per_rank": N_THREADS,
        "steal_ms": steal_ms() - probe["steal_ms"],
        "host": describe_host(),
    }
    return Profile(pd.concat([pd.read_csv(file) for file in files], ignore_index=True), about)


def _describe(spec: RunSpec, points: Sequence[Point], directory: Path, split_backward: bool) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "alone": list(points),
        "together": _spread(points),
        "n_ranks": spec.n_ranks,
        "device": "cpu",
        "split_backward": split_backward,
        "steal_ms": steal_ms(),
    }


def _settle(ranks: Ranks, spec: RunSpec, probe: dict[str, Any]) -> Profile:
    """Have ranks repeat a measurement until it is settled; say in `about` how far it is."""
    with tqdm(total=probe["max_repeats"], unit="repeat", delay=2, leave=False, desc=f"profile, {ranks.n_ranks} rank(s)") as bar:

        def show(message: dict[str, Any]) -> None:
            if math.isfinite(message["error"]):
                bar.set_postfix_str(f"medians ±{message['error']:.1%}", refresh=False)
            bar.update(message["n_repeats"] - bar.n)

        found = ranks.do({"do": "probe", **probe}, show)[0]
    profile = read_probe(probe, spec)
    settled = {
        "device": found["device"],
        "n_repeats": found["n_repeats"],
        "median_error": found["error"] if math.isfinite(found["error"]) else None,  # JSON knows no infinity
        "tolerance": probe["tolerance"],
        "settled": found["error"] <= probe["tolerance"],
    }
    return Profile(profile.frame, profile.about | settled)


def _lengths(seq_tokens: int, shares: Sequence[float]) -> list[int]:
    return [max(1, round(seq_tokens * share)) for share in shares]


def _spread(points: Sequence[Point], n_points: int = 6) -> list[Point]:
    """A few points for contention: lengths over the whole grid, behind no context, half and all of it in turn.

    Ranks share caches and memory bandwidth, which a slice needs the more, the longer its context.
    """
    by_length = [[point for point in points if point[0] == length] for length in sorted({point[0] for point in points})]
    chosen = np.unique(np.linspace(0, len(by_length) - 1, n_points).round().astype(int))
    return [by_length[index][turn % len(by_length[index])] for turn, index in enumerate(chosen)]


def _count_stages(n_ranks: int, n_stages: int | None) -> int:
    check_integer("n_ranks", n_ranks, 1, CostError)
    count = n_ranks if n_stages is None else check_integer("n_stages", n_stages, 1, CostError)
    if count % n_ranks:
        raise CostError(
            f"n_stages={n_stages} is not a multiple of n_ranks={n_ranks}: all ranks measure equally many stages. "
            "Use n_ranks=1, which measures any number of them, one after another."
        )
    return count


def _check_limits(n_repeats: int, max_repeats: int | None, tolerance: float) -> dict[str, Any]:
    least = check_integer("n_repeats", n_repeats, 1, CostError)
    most = 3 * least if max_repeats is None else check_integer("max_repeats", max_repeats, 1, CostError)
    if most < least:
        raise CostError(f"max_repeats={max_repeats} is below n_repeats={n_repeats}. Make it at least that.")
    share = as_number(tolerance)
    if not 0 <= share < math.inf:
        raise CostError(f"tolerance={tolerance!r}: needs a number ≥ 0, e.g. 0.03 for 3 %.")
    return {"n_repeats": least, "max_repeats": most, "tolerance": share}


@contextmanager
def _home(directory: str | Path | None) -> Iterator[Path]:
    """The directory of a profile's rows; without one, a temporary folder."""
    if directory is not None:
        yield Path(directory).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="terapipe-profile-") as root:
        yield Path(root)
