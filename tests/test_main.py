"""The `terapipe` command: what it prints, and that bad input is one message, not a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tiny import SLICED, sleeps, spec

import terapipe as tp
from terapipe.__main__ import main

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Commands write under the folder they are called in."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command(monkeypatch, capsys):
    """Call the command; (exit status, what it printed, what it complained of)."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["terapipe", *map(str, words)])
        try:
            main()
            status: object = 0
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):  # what Python does with a message
                print(status, file=sys.stderr)
                status = 1
        printed = capsys.readouterr()
        return int(status or 0), printed.out, printed.err

    return call


@pytest.fixture
def profile() -> Path:
    """A profile of two equal stages: 1 ms and 0.1 ms a token forward, context 1 % of it; backward twice that."""
    points = [(length, context) for length in (8, 16, 32, 64) for context in (0, (64 - length) // 2, 64 - length)]
    rows = [
        (stage, length, context, 1, together, repeat, *(factor * (1 + 0.1 * length + 0.001 * context) for factor in (1, 2)))
        for stage in (0, 1)
        for length, context in sorted(set(points))
        for together in (False, True)
        for repeat in range(3)
    ]
    names = ["stage", "slice_tokens", "context_tokens", "n_sequences", "together", "repeat", "forward_ms", "backward_ms"]
    return tp.Profile(pd.DataFrame(rows, columns=names)).save("profile.csv")


@pytest.fixture
def spec_file() -> Path:
    path = Path("spec.json")
    path.write_text(spec(clip_grad_norm=1.0).to_json(), "utf-8")
    return path


def test_slice_prints_the_plan_of_optimal_slicing(command, profile):
    status, out, _ = command("slice", "--profile", profile, "--seq-tokens", 64, "--n-stages", 4, "--granularity-tokens", 8)
    plan = tp.optimal_slicing(tp.Profile.load(profile).fit(), 64, 4, granularity_tokens=8, min_slice_tokens=8)
    assert status == 0
    assert out.splitlines()[0] == str(plan.slicing)
    assert f"latency {plan.latency_ms:.3f} ms (two-phase)" in out


def test_simulate_prints_step_bubble_and_budget_and_draws(command, profile):
    words = ["simulate", "--profile", profile, "--slicing", "[(1, [32, 32])]", "--n-ranks", 2, "--figure", "timeline.html"]
    status, out, _ = command(*words)
    cost = tp.Profile.load(profile).fit()
    timeline = tp.simulate(tp.build_schedule("terapipe", 2, "[(1, [32, 32])]"), cost)
    assert status == 0
    assert f"step {timeline.makespan_ms:.3f} ms, bubble fraction {timeline.bubble_fraction:.3f} (simulated)" in out
    assert all(part in out for part in ("useful", "dependency", "fill", "drain", "wrote timeline.html"))
    assert "<html" in Path("timeline.html").read_text("utf-8")


def test_run_trains_a_spec_and_prints_its_summary(command, spec_file):
    status, out, _ = command("run", "--spec", spec_file)
    [directory] = Path("runs").iterdir()
    run = tp.load_run(directory)
    assert status == 0
    assert len(run.losses) == 2
    assert all(part in out for part in ("schedule", "terapipe", SLICED, "measured", "loss_last"))


def test_run_takes_an_emulated_spec_too(command):
    Path("emulated.json").write_text(spec(device="emulated", cost=sleeps(1, 1)).to_json(), "utf-8")
    status, out, _ = command("run", "--spec", "emulated.json")
    assert status == 0
    assert "emulated" in out


def test_verify_prints_every_tensors_error(command, spec_file):
    status, out, _ = command("verify", "--spec", spec_file)
    assert status == 0
    assert "layers.3.feed_forward.down.weight" in out
    assert "allowed 1e-05" in out


@pytest.mark.parametrize("error", [1e-3, np.nan])
def test_verify_fails_where_a_gradient_is_wrong_or_not_a_number(error, command, spec_file, monkeypatch):
    report = pd.DataFrame({"spec": [0], "name": ["loss"], "max_relative_error": [error]})
    report.attrs["tolerance"] = [1e-5]
    monkeypatch.setattr(tp, "verify", lambda _: report)
    status, out, _ = command("verify", "--spec", spec_file)
    assert status == 1
    assert "loss" in out


def test_doctor_says_what_this_machine_offers(command):
    status, out, _ = command("doctor")
    assert status == 0
    for part in ("python", "torch", "cores", "backend", "gloo", "free port", "2 ranks started, talked over gloo", "browser"):
        assert part in out


def test_profile_measures_a_preset_and_writes_it(command):
    status, out, _ = command("profile", "--out", "tour.csv", "--seq-tokens", 64, "--n-repeats", 1)
    assert status == 0
    assert "contention" in out
    assert "wrote tour.csv" in out
    assert tp.Profile.load("tour.csv").n_stages == 2
    assert json.loads(Path("tour.json").read_text("utf-8"))["model"] == tp.ModelConfig.preset("tour").to_dict()


def test_demo_runs_the_demo_in_the_directory_given(command, monkeypatch):
    asked = []
    monkeypatch.setattr("terapipe.demo.run_demo", asked.append)
    assert command("demo", "--directory", "here")[0] == 0
    assert asked == [Path("here")]


BAD = {
    "no such profile": (["slice", "--profile", "no.csv", "--seq-tokens", "64", "--n-stages", "2"], "no profile at no.csv"),
    "a step that does not divide": (
        ["slice", "--profile", "profile.csv", "--seq-tokens", "64", "--n-stages", "2", "--granularity-tokens", "7"],
        "granularity_tokens=7 does not divide seq_tokens=64",
    ),
    "no slicing": (["simulate", "--profile", "profile.csv", "--slicing", "[(1, [32"], "'[(1, [32' is not a slicing"),
    "no such family": (
        ["simulate", "--profile", "profile.csv", "--slicing", "[(1, [32])]", "--schedule", "terrapipe"],
        "Did you mean 'terapipe'?",
    ),
    "no such spec": (["run", "--spec", "no.json"], "'no.json': no such file"),
    "a spec that cannot start": (["run", "--spec", "impossible.json"], "5 stages for 4 layers"),
    "a spec of another format": (["verify", "--spec", "other.json"], 'not a run spec of "format": 1'),
    "no such model": (["profile", "--out", "x.csv", "--model", "tuor"], "unknown model preset 'tuor'. Did you mean 'tour'?"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_message_and_a_status(what, command, profile):
    Path("impossible.json").write_text(json.dumps(json.loads(spec().to_json()) | {"n_ranks": 5}), "utf-8")
    Path("other.json").write_text('{"format": 7}', "utf-8")
    words, said = BAD[what]
    status, out, err = command(*words)
    assert status == 1
    assert err.startswith("terapipe: ")
    assert said in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize("words", [[], ["rum"], ["slice"], ["run", "--spex", "x.json"], ["slice", "--n-stages", "two"]])
def test_a_command_line_that_is_none_shows_how_it_goes(words, command):
    status, out, err = command(*words)
    assert status == 2
    assert "terapipe" in out + err
    assert "Traceback" not in out + err


def test_a_rank_that_fails_is_a_message_too(command, spec_file, monkeypatch):
    monkeypatch.setenv("TERAPIPE_FAULT", "1:1F0.2:exit3")
    status, _, err = command("run", "--spec", spec_file)
    assert status == 1
    assert err.count("terapipe: rank 1 failed: it exited with status 3") == 1
    assert "Traceback" not in err


def test_it_is_a_module_and_a_command(profile):
    words = ["simulate", "--profile", str(profile), "--slicing", "[(1, [64])]"]
    script = Path(sys.executable).parent / "terapipe"
    callers = [[sys.executable, "-m", "terapipe"], *([[str(script)]] if script.exists() else [])]
    for caller in callers:
        done = subprocess.run([*caller, *words], capture_output=True, text=True, timeout=50, check=False)
        assert done.returncode == 0, done.stderr
        assert "(simulated)" in done.stdout
    bad = subprocess.run([*callers[0], "run", "--spec", "no.json"], capture_output=True, text=True, timeout=50, check=False)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr == "terapipe: 'no.json': no such file; it needs a spec as RunSpec.to_json writes it.\n"
