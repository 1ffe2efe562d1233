"""Scripts in processes of their own, and what is left of a process and its children."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

TESTS = Path(__file__).parent


def start_script(code: str, directory: Path, before: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    """Write a script and start it in a session of its own; `tiny` can be imported."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "script.py"
    script.write_text(code, encoding="utf-8")
    return start([*before, sys.executable, str(script)], directory, **environment)


def start(command: Sequence[str], directory: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own, its output in one pipe."""
    everything = {**os.environ, "PYTHONPATH": str(TESTS), **environment}
    return subprocess.Popen(
        command,
        cwd=directory,
        env=everything,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output(process: subprocess.Popen[str], timeout_s: float = 60) -> str:
    """What a process printed, once it ended well."""
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, text
    return text


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> float:
    """Seconds until the condition holds; fails where it does not in time."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - begin


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie does not."""
    return [process for process in processes if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks_of(pid: int) -> list[psutil.Process]:
    """The rank processes that a launching process has: children of its fork server."""
    grandchildren = [each for child in psutil.Process(pid).children() for each in child.children()]
    return sorted(alive(grandchildren), key=lambda process: process.pid)


def steps_written(directory: Path, rank: int = 0) -> int:
    """Number of steps, warm-up included, that a rank has written so far."""
    path = directory / f"timings-rank-{rank}.csv"
    lines = path.read_text("utf-8").splitlines()[1:] if path.exists() else []
    return len({line.partition(",")[0] for line in lines})
