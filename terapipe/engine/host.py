"""The machine a rank runs on: its cores, its versions, and what else keeps it busy."""

import ctypes
import os
import platform
import sys
import time
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


def keep_memory() -> None:
    """Have the C library keep freed memory instead of returning it to the system (glibc only).

    A slice's activations live until its backward, so every step would fault the same pages in again:
    10 % of a forward on virtual machines. Memory kept is what CUDA's allocator does, too.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        largest = 2**31 - 1
        mallopt(-1, largest)  # M_TRIM_THRESHOLD: the heap's top is never given back
        mallopt(-3, largest)  # M_MMAP_THRESHOLD: large tensors come from the heap as well


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


def sharpen_timer() -> None:
    """Ask Linux to wake this thread on time: its timers may be 50 µs late by default."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1000, 0, 0, 0)  # PR_SET_TIMERSLACK, in nanoseconds


def sleep_until(moment_ns: int) -> None:
    """Sleep until a moment of perf_counter."""
    time.sleep(max(0.0, (moment_ns - time.perf_counter_ns()) / 1e9))
