"""The main job at a size for tests: every number of the summary, and a report that needs nothing else."""

import json

import pandas as pd
import plotly.graph_objects as go
import pytest

import terapipe as tp
from terapipe import demo
from terapipe.errors import SpecError
from terapipe.report import Section, write_report

SMALL = {
    "SEQ_TOKENS": 128,
    "GRANULARITY_TOKENS": 8,
    "N_EMULATED_RANKS": 3,
    "N_REPEATS": 2,
    "N_ROUNDS": 3,
    "N_EMULATED_ROUNDS": 2,
    "N_ONE_PROCESS": 1,
    "MAX_ATTEMPTS": 2,
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A small demo on a machine that is never steady enough: every attempt is made."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(demo, name, value)
        patch.setattr(demo, "MAX_DRIFT", -1.0)
        patch.setattr(demo.ModelConfig, "preset", lambda name: tp.ModelConfig(4, 32, 4, max_seq_tokens=128))
        demo.run_demo(directory)
    return directory


@pytest.mark.timeout(120)
def test_the_summary_holds_measured_beside_predicted_and_all_attempts(done):
    summary = json.loads((done / "summary.json").read_text())
    slicing = tp.Slicing.parse(summary["slicing"])
    assert (slicing.seq_tokens, slicing.n_microbatches, summary["n_ranks"]) == (128, 1, 2)
    positive = [name for name in summary if name.endswith(("_step_ms", "speedup", "speedup_low", "half_width"))]
    assert len(positive) >= 14
    assert all(summary[name] > 0 for name in positive)
    assert summary["speedup_low"] <= summary["speedup"] <= summary["speedup_high"]
    assert summary["contention"] == max(1.0, summary["contention_raw"])
    assert summary["ideal_speedup"] == pytest.approx(summary["predicted_gpipe_step_ms"] / summary["predicted_terapipe_step_ms"])
    assert summary["max_relative_gradient_error"] <= 1e-5
    assert summary["max_relative_gradient_error_float64"] <= 1e-10
    assert summary["emulated_n_ranks"] == 3
    assert [attempt["seq_tokens"] for attempt in summary["attempts"]] == [128, 128]
    assert summary["attempts"][-1].items() <= summary.items()  # the last counts


def test_the_report_holds_its_pictures_and_fetches_nothing(done):
    page = (done / "report.html").read_text()
    assert page.count("Plotly.newPlot(") >= 5
    assert "<script src=" not in page
    assert "<link" not in page


def test_what_was_run_can_be_read_back(done):
    run = tp.load_run(done / "attempt-1" / "terapipe")
    assert run.timeline.source == "measured"
    assert len(run.losses) == SMALL["N_ROUNDS"]
    assert not tp.Profile.load(done / "profile.csv").frame.empty


def test_only_an_earlier_demos_results_are_replaced(tmp_path):
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "summary.json").touch()
    demo._clear(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SpecError, match=r"thesis\.tex"):
        demo._clear(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_report_escapes_its_text_and_carries_the_script_once(tmp_path):
    figure = go.Figure(go.Bar(x=[1], y=[2]))
    sections = [Section("a < b", "1 & 2", pd.DataFrame({"n": [3]})), Section("c", "", figure), Section("d", "", figure)]
    page = write_report(tmp_path / "new" / "report.html", "t", sections).read_text()
    assert "<h2>a &lt; b</h2><p>1 &amp; 2</p>" in page
    assert len(page) < 2 * len(figure.to_html(include_plotlyjs=True))
    assert page.count("Plotly.newPlot(") == 2
