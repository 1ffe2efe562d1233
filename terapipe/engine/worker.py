"""What every process runs: it joins its peers, does the jobs it is given, writes results.

Started by `engine.launch`, it gets jobs over its line. Under torchrun,
`python -m terapipe.engine.worker <run directory>` trains that one run.
"""

import gc
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from terapipe.engine.control import ENVIRONMENT, Telephone
from terapipe.engine.host import allowed_cores, describe_host, keep_memory, n_cores, pin, steal_ms, unpinned
from terapipe.engine.mesh import Mesh, PeerLostError
from terapipe.engine.probe import PROBE, Prober, time_fixed_work
from terapipe.engine.rank import RankRun
from terapipe.engine.reference import time_reference
from terapipe.engine.results import Run, load_run, prepare, read_timings
from terapipe.spec import RunSpec

Report = Callable[[dict[str, Any]], None]
N_THREADS = 1  # of a rank
STORE_TIMEOUT = timedelta(seconds=60)
_joined = itertools.count()  # of the launches that this process joined: each needs keys of its own in the store


def serve(rank: int, n_ranks: int, store_port: int, log: str) -> None:
    """Entry point of a launched rank: jobs from the launcher until it says "stop"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a notebook's interrupt goes to the whole group; the launcher decides
    _redirect_output(log)
    telephone = Telephone(os.environ[ENVIRONMENT])
    try:
        _settle()
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=STORE_TIMEOUT)
        mesh = Mesh(store, rank, n_ranks)
        telephone.say({"event": "ready"})
        while (job := telephone.next_job())["do"] != "stop":
            result = do_job(mesh, job, telephone.say)
            telephone.say({"event": "done", "result": result})
        mesh.close()
    except BaseException as error:
        traceback.print_exc()
        telephone.say({"event": "failed", **_describe(error)})
        raise


def do_job(mesh: Mesh, job: dict[str, Any], report: Report) -> Any:
    """Do one job; return what the launcher should know."""
    kind = job["do"]
    if kind == "train":
        return train(mesh, job, report)
    if kind == "probe":
        return measure_slices(mesh, job, report)
    if kind == "fixed work":
        return time_fixed_work(mesh)
    assert kind == "one process"
    return _one_process(mesh, RunSpec.from_json(job["spec"]), job["n_repeats"])


def train(mesh: Mesh, job: dict[str, Any], report: Report) -> None:
    """Train the runs in job["directories"], a step of each in turn.

    job["order"], if given, holds the index of the run that makes the next step, or `PROBE` for a repeat
    of the measurements that job["probes"] describe. job["save"] is that of `RankRun`.
    """
    runs = [RankRun(mesh, Path(directory)) for directory in job["directories"]]
    probers = [Prober.of(mesh, probe) for probe in job["probes"]]
    for prober in probers:
        prober.warm_up()
    order, save = job["order"], job["save"]
    if order is None:
        longest = max(len(run.steps) for run in runs)
        order = [index for step in range(longest) for index, run in enumerate(runs) if step < len(run.steps)]
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in the middle of a step would be timed
    next_step = [run.steps.start for run in runs]
    for index in order:
        if index == PROBE:
            for prober in probers:
                prober.measure()
        else:
            runs[index].run_step(next_step[index], save)
            next_step[index] += 1
        if mesh.rank == 0:
            report({"event": "step", "run": index})
        gc.collect()
    gc.enable()
    for run in runs:
        if save == "parameters":
            run.save_parameters()
        run.close()
    for prober in probers:
        prober.close()


def measure_slices(mesh: Mesh, job: dict[str, Any], report: Report) -> dict[str, Any]:
    """Measure the points of a job until their medians are settled.

    At least job["n_repeats"] times, at most job["max_repeats"], and between them until the medians'
    error is at most job["tolerance"] (`Prober.progress`). Repeats in job["directory"] count.
    """
    prober = Prober.of(mesh, job)

    def is_done(n_repeats: int, error: float) -> bool:
        is_settled = n_repeats >= int(job["n_repeats"]) and error <= float(job["tolerance"])
        return is_settled or n_repeats >= int(job["max_repeats"])

    n_repeats, error = prober.progress()
    if not is_done(n_repeats, error):
        prober.warm_up()
    while not is_done(n_repeats, error):
        gc.collect()
        gc.disable()  # a collection in the middle of a slice would be timed
        prober.measure()
        gc.enable()
        n_repeats, error = prober.progress()
        if mesh.rank == 0:
            report({"event": "step", "n_repeats": n_repeats, "error": error})
    prober.close()
    return {"n_repeats": n_repeats, "error": error, "device": prober.clock.name}


def _one_process(mesh: Mesh, spec: RunSpec, n_repeats: int) -> dict[str, Any] | None:
    """The step in rank 0 alone, with every core: the best use of the machine without a pipeline."""
    result = None
    if mesh.rank == 0:
        with unpinned():
            torch.set_num_threads(n_cores())
            result = time_reference(spec, n_repeats)
        torch.set_num_threads(N_THREADS)
        pin(mesh.rank)
    mesh.barrier()
    return result


def _redirect_output(log: str) -> None:
    """Everything this process prints, also from C++, goes to its log."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _describe(error: BaseException) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "echo": isinstance(error, PeerLostError),
    }


def finish(runs: Sequence[Run], stolen_ms: float) -> None:
    """Merge the ranks' tables, and note the machine and the time that others stole from it."""
    ranks = {"threads_per_rank": N_THREADS, "pinned": bool(allowed_cores()), "steal_ms": stolen_ms}
    for run in runs:
        read_timings(run.directory, run.spec).to_parquet(run.directory / "timings.parquet", index=False)
        host = describe_host() | ranks | {"seed": run.spec.seed, "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        (run.directory / "host.json").write_text(json.dumps(host, indent=2) + "\n", encoding="utf-8")


def _settle() -> None:
    """Make this process a rank: one thread, and memory that stays."""
    torch.set_num_threads(N_THREADS)
    keep_memory()


def join(directories: list[Path], specs: Sequence[RunSpec] = ()) -> None:
    """Train runs in a process that torchrun or another launcher started (RANK is set).

    Directories are prepared already, or made here from the specs.
    """
    _settle()
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = Mesh(dist.PrefixStore(f"terapipe-{_attempt()}-{next(_joined)}", _outer_store()), rank, n_ranks)
    if rank == 0:  # the others have checked their specs by now, and with them that the directories are new
        for spec, directory in zip(specs, directories, strict=False):
            prepare(spec, directory)
    mesh.barrier()
    stolen = steal_ms()
    job = {"directories": directories, "order": None, "save": None, "probes": []}
    train(mesh, job, lambda message: print(json.dumps(message), flush=True))
    mesh.barrier()
    if rank == 0:
        finish([load_run(directory) for directory in directories], steal_ms() - stolen)
    mesh.barrier()
    mesh.close()


@cache
def _outer_store() -> dist.TCPStore:
    """The store at MASTER_ADDR:MASTER_PORT, which torchrun's agent hosts; without an agent, rank 0 does."""
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        n_ranks,
        rank == 0 and not _agent_store(),
        timeout=STORE_TIMEOUT,
    )


def _attempt() -> str:
    """Number of torchrun's attempt: after a restart the store still holds the keys of the one before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _agent_store() -> bool:
    """Whether torchrun's agent already hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


if __name__ == "__main__":
    if len(sys.argv) != 2 or "RANK" not in os.environ:
        sys.exit("usage: torchrun --nproc-per-node N -m terapipe.engine.worker <run directory>")
    join([Path(sys.argv[1])])
