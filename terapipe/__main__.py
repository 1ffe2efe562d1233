"""The `terapipe` command: the toolkit's functions from a shell."""

import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from terapipe.errors import TerapipeError

if TYPE_CHECKING:
    from terapipe.spec import RunSpec


def demo(directory: Path = Path("runs/demo")) -> None:
    """Measure, plan, simulate, train, verify and look at one sliced pipeline; writes summary.json and report.html."""
    from terapipe.demo import run_demo

    run_demo(directory)


def doctor() -> None:
    """Say what this machine offers: versions, cores, a two-rank launch over loopback, a browser for pictures."""
    import torch

    from terapipe.engine.host import describe_host
    from terapipe.engine.launch import Ranks
    from terapipe.plots import find_browser

    host = describe_host()
    for name, version in {"python": host["python"], **host["versions"]}.items():
        print(f"{name:<12}{version}")
    print(f"{'machine':<12}{host['processor']}, {host['system']}")
    print(f"{'cores':<12}{host['cores']} (affinity); each rank gets one, with one thread")
    gloo = "gloo" if torch.distributed.is_gloo_available() else "no gloo: ranks cannot talk to each other"
    cuda = f"{torch.cuda.device_count()} CUDA device(s)" if torch.cuda.is_available() else "no CUDA device"
    print(f"{'backend':<12}{gloo}; {cuda}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        print(f"{'free port':<12}{free.getsockname()[1]} (each launch picks its own)")
    with tempfile.TemporaryDirectory(prefix="terapipe-doctor-") as root:
        start = time.perf_counter()
        with Ranks(2, Path(root)) as ranks:
            ranks.do({"do": "fixed work"})
        print(f"{'loopback':<12}2 ranks started, talked over gloo and stopped in {time.perf_counter() - start:.1f} s")
    print(f"{'browser':<12}{find_browser() or 'none: pictures cannot be exported, .html can (see tp.plots.save)'}")


def profile(out: Path, model: str = "tour", seq_tokens: int = 1024, n_ranks: int = 2, n_repeats: int = 5) -> None:
    """Measure what slices of a preset model cost here; writes a CSV."""
    import terapipe as tp

    measured = tp.profile(tp.ModelConfig.preset(model), seq_tokens, n_ranks, n_repeats=n_repeats)
    print(measured.held_out_error().to_string(index=False))
    print(f"contention {measured.contention_raw:.3f}\nwrote {measured.save(out)}")


def slice_(
    profile: Path,
    seq_tokens: int,
    n_stages: int,
    granularity_tokens: int = 16,
    objective: Literal["two-phase", "paper"] = "two-phase",
    max_slices: int | None = None,
) -> None:
    """Find the best slices for a profile's costs."""
    import terapipe as tp

    cost = tp.Profile.load(profile).fit()
    options: dict[str, Any] = {"granularity_tokens": granularity_tokens, "min_slice_tokens": cost.slice_tokens[0]}
    plan = tp.optimal_slicing(cost, seq_tokens, n_stages, objective=objective, max_slices=max_slices, **options)
    print(f"{plan.slicing}\nlatency {plan.latency_ms:.3f} ms ({plan.objective}), lower bound {plan.lower_bound_ms:.3f} ms")


def simulate(
    profile: Path,
    slicing: str,
    n_ranks: int = 2,
    schedule: str = "terapipe",
    contention: float = 1.0,
    figure: Path | None = None,
) -> None:
    """Simulate a schedule on a profile's costs; with --figure, draw it into a file."""
    import terapipe as tp

    built = tp.build_schedule(schedule, n_ranks, slicing)
    timeline = tp.simulate(built, tp.Profile.load(profile).fit(), contention=contention)
    print(f"step {timeline.makespan_ms:.3f} ms, bubble fraction {timeline.bubble_fraction:.3f} ({timeline.source})")
    print(timeline.budget().round(3).to_string())
    if figure is not None:
        print(f"wrote {tp.plots.save(tp.plots.timeline(timeline), figure)}")


def run(spec: Path) -> None:
    """Run a spec (JSON, as RunSpec.to_json writes it) on real ranks."""
    import terapipe as tp

    print(tp.run(_read(spec)).summary().to_string())


def verify(spec: Path) -> None:
    """Compare every gradient of a spec's run with one process, unsliced."""
    import terapipe as tp

    report = tp.verify(_read(spec))
    worst, tolerance = report["max_relative_error"].max(), report.attrs["tolerance"][0]
    print(f"{report.to_string(index=False)}\nlargest {worst:.2e}, allowed {tolerance:.0e}")
    if not worst <= tolerance:
        sys.exit(1)


def _read(spec: Path) -> "RunSpec":
    from terapipe.errors import SpecError
    from terapipe.spec import RunSpec

    if not spec.is_file():
        raise SpecError(f"{str(spec)!r}: no such file; it needs a spec as RunSpec.to_json writes it.")
    return RunSpec.from_json(spec.read_text("utf-8"))


@contextmanager
def _plain_errors() -> Iterator[None]:
    """An error that the user can mend is a message, not a traceback."""
    try:
        yield
    except TerapipeError as error:
        sys.exit(f"terapipe: {error}")


def main() -> None:
    """Entry point of the `terapipe` command."""
    commands: dict[str, Callable[..., Any]] = {
        "demo": demo,
        "doctor": doctor,
        "profile": profile,
        "slice": slice_,
        "simulate": simulate,
        "run": run,
        "verify": verify,
    }
    with _plain_errors():
        tyro.extras.subcommand_cli_from_dict(commands, prog="terapipe", description=__doc__)


if __name__ == "__main__":
    main()
