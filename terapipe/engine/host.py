"""The machine a rank runs on: its cores, its versions, and what else keeps it busy."""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

_ALLOWED: set[int] = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def allowed_cores() -> list[int]:
    """Cores this process may use; empty where the system does not say (macOS)."""
    return sorted(_ALLOWED)


def n_cores() -> int:
    """Number of cores this process may use."""
    return len(_ALLOWED) or os.cpu_count() or 1


def pin(rank: int) -> None:
    """Bind the calling thread to one core, rank after rank.

    Unpinned, two busy ranks often share a core. Only the calling thread: threads that exist already,
    gloo's among them, stay free.
    """
    cores = allowed_cores()
    if cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def unpinned() -> Iterator[None]:
    """Let the calling thread, and threads started meanwhile, use every allowed core."""
    if not _ALLOWED:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _ALLOWED)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def steal_ms() -> float:
    """Milliseconds that the hypervisor gave to others since boot, over all cores; 0 where unknown."""
    try:
        fields = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) * 1e3 / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def describe_host() -> dict[str, Any]:
    """Machine and versions, for a run's directory."""
    packages = ("terapipe", "torch", "numpy", "pandas", "pyarrow")
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": allowed_cores() or n_cores(),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in packages},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
