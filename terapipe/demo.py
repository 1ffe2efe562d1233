"""The main job, end to end: measure, plan, simulate, train, verify, and look at one sliced pipeline.

`terapipe demo` and `make demo` run it; notebooks/00_tour.ipynb tells the same story cell by cell.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from terapipe import plots
from terapipe.config import ModelConfig
from terapipe.cost import CostModel, LinearContextCost
from terapipe.engine.host import describe_host
from terapipe.engine.launch import Ranks, prepare_all
from terapipe.engine.verify import verify
from terapipe.errors import SpecError
from terapipe.experiment import Predictor, prepare_race, race, run_race
from terapipe.report import Section, write_report
from terapipe.schedule import build_schedule
from terapipe.simulator import simulate
from terapipe.slicing import Slicing, SlicingPlan, optimal_slicing, uniform_slicing
from terapipe.spec import RunSpec
from terapipe.timeline import Timeline

SEQ_TOKENS = 1024
N_RANKS, N_EMULATED_RANKS = 2, 8
GRANULARITY_TOKENS = 16
N_REPEATS, N_ROUNDS, ROUNDS_PER_PROBE = 4, 14, 3
N_EMULATED_ROUNDS, N_ONE_PROCESS = 3, 5
LEARNING_RATE = 1e-3
MAX_DRIFT, MAX_ATTEMPTS = 0.05, 3
RESULTS = ("attempt-[0-9]", "profile.csv", "profile.json", "summary.json", "report.html")

Summary = dict[str, Any]


class Attempt:
    """One measurement on real ranks: profile, plan and race in one launch, between two looks at the machine's speed.

    Slicing and contention come from a profile measured before the race. Slices are measured again between
    its rounds, alone, and predictions use all: a machine whose speed wanders then slows costs and race alike.
    """

    def __init__(self, model: ModelConfig, directory: Path) -> None:
        self.model, self.directory = model, directory
        self.whole = uniform_slicing(SEQ_TOKENS, 1)

    def run(self) -> Summary:
        """Measure; return the numbers of the summary."""
        with Ranks(N_RANKS, self.directory) as ranks:
            before = _fastest(ranks.do({"do": "fixed work"}))
            self.predictor = Predictor(ranks, self._spec(self.whole, "gpipe"), self.directory, N_REPEATS)
            self.plan = plan_slices(self.predictor.before.fit(), N_RANKS)
            self._run_race(ranks)
            one_process = ranks.do(
                {"do": "one process", "spec": self._spec(self.whole, "gpipe").to_json(), "n_repeats": N_ONE_PROCESS}
            )[0]
            after = _fastest(ranks.do({"do": "fixed work"}))
        return self._summary(one_process, after / before - 1)

    def _spec(self, slicing: Slicing, schedule: str) -> RunSpec:
        return RunSpec(self.model, slicing, schedule, n_ranks=N_RANKS, learning_rate=LEARNING_RATE, clip_grad_norm=1.0)

    def _run_race(self, ranks: Ranks) -> None:
        prepared = prepare_race([self._spec(self.whole, "gpipe"), self._spec(self.plan.slicing, "terapipe")], N_ROUNDS)
        names = ("gpipe", "terapipe", "gpipe-again")
        placed = [spec.replaced(directory=self.directory / name) for spec, name in zip(prepared, names, strict=True)]
        probe = self.predictor.probe | {"together": []}  # contention is that of before the race
        self.race = run_race(ranks, placed, prepare_all(placed), probes=[probe], rounds_per_probe=ROUNDS_PER_PROBE)

    def predict(self, contention: float) -> tuple[Timeline, Timeline]:
        """GPipe and TeraPipe, simulated on the profile."""
        return simulate_pair(self.plan.slicing, self.predictor.costs, N_RANKS, contention)

    def _summary(self, one_process: Summary, drift: float) -> Summary:
        gpipe, terapipe = self.predict(self.predictor.before.contention)
        free = [timeline.makespan_ms for timeline in self.predict(1.0)]
        raced, losses = self.race.table, self.race.runs[1].losses["loss"]
        measured = [float(time) for time in raced["step_ms"].iloc[:2]]
        speedup, low, high = (float(value) for value in raced.loc[1, ["speedup", "speedup_low", "speedup_high"]].to_numpy())
        error = self.predictor.profile.held_out_error()
        return {
            "slicing": str(self.plan.slicing),
            "seq_tokens": SEQ_TOKENS,
            "n_ranks": N_RANKS,
            "gpipe_step_ms": measured[0],
            "terapipe_step_ms": measured[1],
            "speedup": speedup,
            "speedup_low": low,
            "speedup_high": high,
            "aa_half_width": self.race.aa_half_width,
            "n_rounds": N_ROUNDS,
            "contention": self.predictor.before.contention,
            "contention_raw": self.predictor.before.contention_raw,
            "predicted_gpipe_step_ms": gpipe.makespan_ms,
            "predicted_terapipe_step_ms": terapipe.makespan_ms,
            "ideal_speedup": gpipe.makespan_ms / terapipe.makespan_ms,
            "ideal_speedup_without_contention": free[0] / free[1],
            "compute_sliced_over_whole": _busy(self.race.runs[1].timeline) / _busy(self.race.runs[0].timeline),
            "one_process_step_ms": float(np.median(one_process["step_ms"])),
            "one_process_threads": one_process["n_threads"],
            "fit_error_median": float(error["median"].max()),
            "fit_error_p95": float(error["p95"].max()),
            "repeat_noise": float(error["noise"].max()),
            "loss_first": float(losses.iloc[0]),
            "loss_last": float(losses.iloc[-1]),
            "drift": drift,
        }


def run_demo(directory: Path) -> Summary:
    """Do the whole job; write summary.json and report.html into the directory, and return the summary."""
    _clear(directory)
    model, attempts = ModelConfig.preset("tour"), []
    for number in range(MAX_ATTEMPTS):
        _say(f"measuring, planning and racing on {N_RANKS} ranks (attempt {number + 1} of at most {MAX_ATTEMPTS})")
        attempt = Attempt(model, (directory / f"attempt-{number + 1}").absolute())
        attempt.directory.mkdir()
        attempts.append(attempt.run())
        drift = attempts[-1]["drift"]
        if abs(drift) <= MAX_DRIFT:
            break
        _say(f"the machine's own speed changed by {drift:+.1%} meanwhile; more than {MAX_DRIFT:.0%} is measured again")
    _say("comparing every gradient with one process, unsliced")
    errors = [verify_slicing(model, attempt.plan.slicing, dtype) for dtype in ("float32", "float64")]
    _say(f"racing {N_EMULATED_RANKS} emulated ranks")
    emulated = Emulation(attempt.predictor.profile.fit())
    summary = attempts[-1] | {
        "max_relative_gradient_error": errors[0],
        "max_relative_gradient_error_float64": errors[1],
        **emulated.run(),
        "n_attempts": len(attempts),
        "attempts": attempts,
        "host": describe_host(),
    }
    attempt.predictor.profile.save(directory / "profile.csv")
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _report(directory / "report.html", summary, attempt, emulated)
    print(summary_table(summary).to_string(index=False))
    _say(f"wrote {directory / 'summary.json'} and {directory / 'report.html'}")
    return summary


def _clear(directory: Path) -> None:
    """Make the directory, without an earlier demo's results; anything else in it is refused, not removed."""
    found = list(directory.iterdir()) if directory.exists() else []
    foreign = [path.name for path in found if not any(path.match(pattern) for pattern in RESULTS)]
    if foreign:
        raise SpecError(f"{str(directory)!r} holds other things than a demo's results ({foreign[0]!r}). Choose another folder.")
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    directory.mkdir(parents=True, exist_ok=True)


def plan_slices(cost: LinearContextCost, n_stages: int) -> SlicingPlan:
    """The best slices of the demo's sequence, no shorter than what was measured."""
    return optimal_slicing(
        cost, SEQ_TOKENS, n_stages, granularity_tokens=GRANULARITY_TOKENS, min_slice_tokens=cost.slice_tokens[0]
    )


def simulate_pair(
    slicing: Slicing, cost: CostModel | list[LinearContextCost], n_ranks: int, contention: float = 1.0
) -> tuple[Timeline, Timeline]:
    """An unsliced GPipe and a sliced TeraPipe step of the same sequence, messages free."""
    whole = build_schedule("gpipe", n_ranks, uniform_slicing(slicing.seq_tokens, 1))
    sliced = build_schedule("terapipe", n_ranks, slicing)
    return simulate(whole, cost, contention=contention), simulate(sliced, cost, contention=contention)


def verify_slicing(model: ModelConfig, slicing: Slicing, dtype: str) -> float:
    """Largest relative error of any gradient or the loss, against one process."""
    report = verify(RunSpec(model, slicing, n_ranks=N_RANKS).replaced(dtype=dtype))
    return float(report["max_relative_error"].max())


class Emulation:
    """The same race on 8 emulated ranks, each costing what a stage measured here costs."""

    def __init__(self, cost: LinearContextCost) -> None:
        self.cost = cost
        self.plan = plan_slices(cost, N_EMULATED_RANKS)

    def run(self) -> Summary:
        """Race; return the numbers of the summary."""
        model = ModelConfig.preset("tour")
        deep = ModelConfig.from_dict(model.to_dict() | {"n_layers": 2 * N_EMULATED_RANKS})
        specs = [
            RunSpec(deep, slicing, schedule, n_ranks=N_EMULATED_RANKS, device="emulated", cost=self.cost, n_warmup_steps=1)
            for slicing, schedule in ((uniform_slicing(SEQ_TOKENS, 1), "gpipe"), (self.plan.slicing, "terapipe"))
        ]
        self.race = race(specs, N_EMULATED_ROUNDS)
        gpipe, terapipe = simulate_pair(self.plan.slicing, self.cost, N_EMULATED_RANKS)
        raced = self.race.table
        # A critical path of all-forward-then-all-backward runs each slice once and crosses every stage.
        n_critical = 2 * (len(self.plan.slicing.units) + N_EMULATED_RANKS - 1)
        excess_ms = float(raced["step_ms"].iloc[1]) - terapipe.makespan_ms
        return {
            "emulated_n_ranks": N_EMULATED_RANKS,
            "emulated_slicing": str(self.plan.slicing),
            "emulated_gpipe_step_ms": float(raced["step_ms"].iloc[0]),
            "emulated_terapipe_step_ms": float(raced["step_ms"].iloc[1]),
            "emulated_speedup": float(raced["speedup"].iloc[1]),
            "emulated_speedup_low": float(raced["speedup_low"].iloc[1]),
            "emulated_speedup_high": float(raced["speedup_high"].iloc[1]),
            "emulated_aa_half_width": self.race.aa_half_width,
            "emulated_ideal_speedup": gpipe.makespan_ms / terapipe.makespan_ms,
            "emulated_excess_us_per_action": 1e3 * excess_ms / n_critical,
        }


def summary_table(summary: Summary) -> pd.DataFrame:
    """The summary for reading: what was measured, beside what was predicted."""
    error = "{:.1%}".format
    rows = [
        ("slicing (found by the slicing DP)", summary["slicing"], ""),
        ("GPipe step, unsliced [ms]", f"{summary['gpipe_step_ms']:.0f}", f"{summary['predicted_gpipe_step_ms']:.0f}"),
        ("TeraPipe step [ms]", f"{summary['terapipe_step_ms']:.0f}", f"{summary['predicted_terapipe_step_ms']:.0f}"),
        (
            "speed-up over an unsliced pipeline",
            f"{summary['speedup']:.2f} [{summary['speedup_low']:.2f}, {summary['speedup_high']:.2f}]",
            f"{summary['ideal_speedup']:.2f}",
        ),
        ("noise (A/A pair, ±)", f"{summary['aa_half_width']:.3f}", ""),
        ("contention between the ranks", f"{summary['contention']:.2f}", ""),
        ("compute, sliced ÷ whole", f"{summary['compute_sliced_over_whole']:.2f}", ""),
        ("one process, all threads [ms]", f"{summary['one_process_step_ms']:.0f}", ""),
        ("fit error, held out (median, p95)", f"{error(summary['fit_error_median'])}, {error(summary['fit_error_p95'])}", ""),
        ("largest gradient error, float32", f"{summary['max_relative_gradient_error']:.1e}", "0"),
        ("loss, first and last step", f"{summary['loss_first']:.3f}, {summary['loss_last']:.3f}", ""),
        (
            f"{summary['emulated_n_ranks']} emulated ranks: speed-up",
            f"{summary['emulated_speedup']:.2f}",
            f"{summary['emulated_ideal_speedup']:.2f}",
        ),
        ("… excess an action [µs]", f"{summary['emulated_excess_us_per_action']:.0f}", "0"),
    ]
    return pd.DataFrame(rows, columns=["", "measured", "predicted"])


def _report(path: Path, summary: Summary, attempt: Attempt, emulated: Emulation) -> None:
    """The pictures, with what they say."""
    gpipe, terapipe = attempt.predict(attempt.predictor.before.contention)
    measured = {name: run.timeline for name, run in zip(("GPipe", "TeraPipe"), attempt.race.runs, strict=True)}
    eight = {name: run.timeline for name, run in zip(("GPipe", "TeraPipe"), emulated.race.runs, strict=True)}
    sections = [
        Section("In numbers", "Medians of raced rounds; in brackets the 95 % interval.", summary_table(summary)),
        Section(
            "One sequence, two ranks: GPipe above TeraPipe",
            "In GPipe rank 1 waits for the whole sequence. Cut into slices, both ranks work at once.",
            plots.compare(measured),
        ),
        Section(
            "The slices",
            "Later slices attend to more tokens, and each has its own overhead: the slicing DP weighs one against the other.",
            plots.slicing(attempt.plan),
        ),
        Section(
            "Predicted beside measured",
            "The simulator knows only what slices cost, measured alone before the race and between its rounds, "
            "and the contention, measured before it.",
            plots.compare({"predicted": terapipe, "measured": measured["TeraPipe"]}),
        ),
        Section(
            "Where the ranks' time went",
            "",
            plots.budget(measured | {"GPipe, predicted": gpipe, "TeraPipe, predicted": terapipe}),
        ),
        Section(
            f"{N_EMULATED_RANKS} emulated ranks",
            "Real processes and messages, but an action sleeps for what it would cost: this tests order and runtime, not cost.",
            plots.compare(eight),
        ),
    ]
    write_report(path, "One sliced pipeline, end to end", sections)


def _fastest(times_by_rank: list[list[float]]) -> float:
    """A fixed computation's time: the lower quartile of each rank's repeats, averaged over ranks."""
    return float(np.mean([np.quantile(times, 0.25) for times in times_by_rank]))


def _busy(timeline: Timeline) -> float:
    return float(timeline.steps["busy_ms"].median())


def _say(text: str) -> None:
    print(f"· {text}", flush=True)
