"""Starts the ranks' processes, gives them jobs, watches over them, and gathers what they leave.

Processes come from torch elastic's process layer, started by a fork server that has torch loaded
already: a relaunch takes well under two seconds, and nothing is ever forked from a notebook's
kernel. No port is fixed, every socket is on loopback.
"""

import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext, start_processes
from tqdm.auto import tqdm

from terapipe.engine import worker
from terapipe.engine.control import Switchboard
from terapipe.engine.host import steal_ms
from terapipe.engine.results import Run, load_run, new_directory, prepare
from terapipe.errors import RunError, SpecError
from terapipe.spec import RunSpec

START_TIMEOUT_S = 90.0
ECHO_PATIENCE_S = 4.0  # how long to look for the cause once a rank reports that it lost another
# Loaded by the fork server; never terapipe or the user's modules, which may change. (Optimizers import _dynamo.)
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy", "pandas"]
_ELASTIC_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"

Progress = Callable[[dict[str, Any]], object]


class Ranks:
    """Processes that stay ready for jobs; a context manager, so that none outlives its block."""

    def __init__(self, n_ranks: int, directory: Path) -> None:
        self.n_ranks, self.directory = n_ranks, directory
        self.failures: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        self.switchboard = Switchboard(self.n_ranks)
        self.store = _loopback_store()
        try:
            self._start()
            self._collect("ready", time.monotonic() + START_TIMEOUT_S)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.switchboard.send({"do": "stop"})
            self.context.wait(timeout=10, period=0.01)
        self._kill()

    def do(self, job: dict[str, Any], progress: Progress | None = None) -> list[Any]:
        """Give every rank a job; return their results, in rank order.

        Raises
        ------
        RunError
            As soon as a rank fails, with its number and its own message.
        """
        self.switchboard.send(job)
        return self._collect("done", None, progress)

    def train(
        self,
        directories: Sequence[Path],
        order: Sequence[int] | None = None,
        save: str | None = None,
        probes: Sequence[dict[str, Any]] = (),
    ) -> list[Run]:
        """Train the runs prepared in some directories, a step of each in turn or in the given order; see `worker.train`."""
        runs = [load_run(directory) for directory in directories]
        n_steps = len(order) if order is not None else sum(run.spec.n_steps + run.spec.n_warmup_steps for run in runs)
        stolen = steal_ms()
        named = [str(path) for path in directories]
        job = {"do": "train", "directories": named, "order": order, "save": save, "probes": list(probes)}
        with tqdm(total=n_steps, unit="step", delay=2, leave=False, desc=f"{self.n_ranks} ranks") as bar:
            self.do(job, lambda _: bar.update())
        worker.finish(runs, steal_ms() - stolen)
        return runs

    def _start(self) -> None:
        multiprocessing.set_forkserver_preload(_PRELOAD)
        self.scratch = self.directory / f"launch-{secrets.token_hex(3)}"
        environment = _environment()
        with _quiet_elastic(), _own_signals(), _without_main():
            self.context = start_processes(
                name="terapipe",
                entrypoint=worker.serve,
                args={
                    rank: (rank, self.n_ranks, self.store.port, str(self.directory / f"rank-{rank}.log"))
                    for rank in range(self.n_ranks)
                },
                envs={rank: environment | self.switchboard.environment(rank) for rank in range(self.n_ranks)},
                logs_specs=DefaultLogsSpecs(log_dir=str(self.scratch)),
                start_method="spawn" if sys.platform == "win32" else "forkserver",
            )
        # Elastic's own poll ends every process once one has ended, before a cause can be told from its echo.
        assert isinstance(self.context, MultiprocessContext)
        assert self.context._pc is not None
        self.processes: list[BaseProcess] = self.context._pc.processes

    def _collect(self, event: str, deadline: float | None, progress: Progress | None = None) -> list[Any]:
        """Wait until every rank has said `event`."""
        results: dict[int, Any] = {}
        while len(results) < self.n_ranks:
            # Looked at before listening: whatever a rank said before it ended is then heard.
            ended = {rank: code for rank, process in enumerate(self.processes) if (code := process.exitcode) is not None}
            for rank, message in self.switchboard.receive(0.05):
                if message.get("event") == event:
                    results[rank] = message.get("result")
                elif message.get("event") == "failed":
                    self.failures[rank] = message
                elif message.get("event") == "step" and progress is not None:
                    progress(message)
            self._check_alive(ended)
            if deadline is not None and time.monotonic() > deadline:
                silent = sorted(set(range(self.n_ranks)) - set(results))
                raise RunError(f"rank(s) {silent} did not start within {START_TIMEOUT_S:g} s; see {self.directory}/rank-*.log.")
        return [results[rank] for rank in range(self.n_ranks)]

    def _check_alive(self, ended: Mapping[int, int]) -> None:
        """Raise for a rank that failed of itself; one that only lost another is given time to be explained.

        `ended` holds the exit codes of ranks whose process is gone.
        """
        causes = [rank for rank, failure in self.failures.items() if not failure["echo"]]
        if causes:
            failure = self.failures[causes[0]]
            raise self._error(causes[0], f"{failure['type']}: {failure['message']}")
        silent = [rank for rank in ended if rank not in self.failures]
        if silent:
            code = ended[silent[0]]
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            raise self._error(silent[0], f"it {how} without a message")
        if self.failures:
            first = min(failure.setdefault("heard", time.monotonic()) for failure in self.failures.values())
            if len(self.failures) == self.n_ranks or time.monotonic() - first > ECHO_PATIENCE_S:
                rank, failure = next(iter(self.failures.items()))
                raise self._error(rank, failure["message"])

    def _error(self, rank: int, message: str) -> RunError:
        text = f"rank {rank} failed: {message}\nIts log: {self.directory / f'rank-{rank}.log'}"
        return RunError(f"{text}. Earlier steps: tp.load_run(…).timeline.", rank=rank, directory=str(self.directory))

    def _kill(self) -> None:
        """End every process that is left; the closed lines end them even where signals do not."""
        self.switchboard.close()
        if hasattr(self, "context"):
            with _quiet_elastic():
                self.context.close(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM, timeout=5)
            shutil.rmtree(self.scratch, ignore_errors=True)  # torch elastic's own logs: ranks write theirs


def run(specs: RunSpec | Sequence[RunSpec]) -> Any:
    """Train for real: start the ranks, run every step, gather timings and losses.

    Parameters
    ----------
    specs : RunSpec or list of RunSpec
        Specs that share ranks and device run in one launch, a step of each in turn.

    Returns
    -------
    Run or list of Run
        One for each spec, in order.

    Raises
    ------
    RunError
        Within seconds of a rank's failure, with its number and message. Earlier steps are kept:
        `tp.load_run(error.directory)`.
    """
    several = [specs] if isinstance(specs, RunSpec) else list(specs)
    if not several or not all(isinstance(spec, RunSpec) for spec in several):
        raise SpecError(f"run needs a RunSpec or a list of them, not {specs!r}.")
    if "RANK" in os.environ:
        done = _join(several)
    else:
        done = [None] * len(several)  # type: ignore[list-item]
        for indices in launch_groups(several):
            for index, finished in zip(indices, _launch([several[index] for index in indices]), strict=True):
                done[index] = finished
    return done[0] if isinstance(specs, RunSpec) else done


def _launch(specs: Sequence[RunSpec]) -> list[Run]:
    directories = prepare_all(specs)
    with Ranks(specs[0].n_ranks, launch_directory(directories)) as ranks:
        return ranks.train(directories)


def prepare_all(specs: Sequence[RunSpec]) -> list[Path]:
    """Run directories for specs that share a launch; those without one get a new one under runs/."""
    check_devices(specs)
    root = new_directory(_label(specs)) if any(spec.directory is None for spec in specs) else None
    directories = []
    for index, spec in enumerate(specs):
        if spec.directory is not None:
            directory = Path(spec.directory).absolute()
        else:
            assert root is not None
            directory = root if len(specs) == 1 else root / f"{index}-{spec.schedule_name}"
        directories.append(prepare(spec, directory))
    return directories


def launch_directory(directories: Sequence[Path]) -> Path:
    """Where a launch of these runs keeps its ranks' logs: the run's own directory, or the one above several."""
    return directories[0] if len(directories) == 1 else Path(os.path.commonpath(directories))


def check_devices(specs: Sequence[RunSpec]) -> None:
    """Refuse a device that this machine lacks."""
    if any(spec.device == "cuda" for spec in specs):
        found = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no CUDA device"
        raise SpecError(f"device='cuda': {found} here, and the engine runs on CPUs for now. Use device='cpu' or 'emulated'.")


def launch_groups(specs: Sequence[RunSpec]) -> Iterator[list[int]]:
    """Indices of the specs that share ranks and device, group after group."""
    keys = [(spec.n_ranks, spec.device) for spec in specs]
    for key in dict.fromkeys(keys):
        yield [index for index, other in enumerate(keys) if other == key]


def _label(specs: Sequence[RunSpec]) -> str:
    return specs[0].schedule_name if len(specs) == 1 else f"{len(specs)}-runs"


def _join(specs: Sequence[RunSpec]) -> list[Run]:
    """Take part in runs whose processes another launcher started: every one of them calls this."""
    check_devices(specs)
    for spec in specs:
        if spec.directory is None:
            raise SpecError("under torchrun every process must name the same run directory: pass RunSpec(directory=…).")
        if int(os.environ["WORLD_SIZE"]) != spec.n_ranks:
            raise SpecError(f"torchrun started {os.environ['WORLD_SIZE']} processes, the run has n_ranks={spec.n_ranks}.")
    directories = [Path(str(spec.directory)).absolute() for spec in specs]
    worker.join(directories, specs)
    return [load_run(directory) for directory in directories]


def _loopback_store() -> dist.TCPStore:
    """The ranks' meeting place: on a port the system picks, closed to other machines, in this process."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _environment() -> dict[str, str]:
    """The ranks' environment, whole: the fork server keeps the one it was started with."""
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    defaults = {"GLOO_SOCKET_IFNAME": interface} if interface else {}  # an unresolvable host name must not matter
    return {**defaults, "TERAPIPE_FAULT": "", **os.environ}


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the user's script or notebook: starting a process would run it again in the child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the caller's signal handlers: torch elastic would put its own in their place."""
    before = os.environ.get(_ELASTIC_SIGNALS)
    os.environ[_ELASTIC_SIGNALS] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ELASTIC_SIGNALS]
        else:
            os.environ[_ELASTIC_SIGNALS] = before


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silence torch elastic's report of a failed process; this module raises its own."""
    names = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.multiprocessing.redirects")
    loggers = [logging.getLogger(name) for name in (*names, "torch.multiprocessing.spawn")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
