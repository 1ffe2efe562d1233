"""What a run leaves on disk, and how it is read back: finished, failed, or never begun."""

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tiny import SLICED, sleeps, spec

import terapipe as tp
from terapipe.engine.results import LOSS_COLUMNS, RANK_COLUMNS, new_directory, prepare
from terapipe.errors import SpecError
from terapipe.timeline import COLUMNS

pytestmark = pytest.mark.timeout(60)
BOTH = [SLICED, "[(1, [6, 3]), (2, [4, 5])]"]  # 12 tokens, 6 + 6 actions; then 27 tokens, 8 + 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tp.Run:
    """A finished run of two slicings in turn."""
    root = tmp_path_factory.mktemp("runs")
    return tp.run(spec(root / "finished", slicing=BOTH, n_steps=3))


@pytest.fixture
def copied(run, tmp_path):
    """The finished run's directory, to be damaged; without the merged table."""
    for file in run.directory.iterdir():
        if file.name not in ("timings.parquet", "host.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


class TestTheDirectory:
    def test_it_holds_these_files(self, run):
        assert sorted(path.name for path in run.directory.iterdir()) == [
            "host.json",
            "losses.csv",
            "rank-0.log",
            "rank-1.log",
            "schedule-1.csv",
            "schedule.csv",
            "spec.json",
            "timings-rank-0.csv",
            "timings-rank-1.csv",
            "timings.parquet",
        ]

    def test_its_text_is_the_spec_its_schedules_and_plain_tables(self, run):
        directory = run.directory
        assert json.loads((directory / "spec.json").read_text("utf-8"))["format"] == 1
        for index, schedule in enumerate(run.spec.schedules):
            file = directory / ("schedule.csv" if index == 0 else f"schedule-{index}.csv")
            assert tp.Schedule.from_csv(file, BOTH[index]).orders == schedule.orders
        assert list(pd.read_csv(directory / "timings-rank-1.csv").columns) == RANK_COLUMNS
        assert list(pd.read_csv(directory / "losses.csv").columns) == LOSS_COLUMNS

    def test_host_json_names_machine_versions_threads_seed_and_steal(self, run):
        assert {
            "host",
            "system",
            "processor",
            "cores",
            "python",
            "versions",
            "threads_per_rank",
            "pinned",
            "steal_ms",
            "seed",
        } <= set(run.host)
        assert {"terapipe", "torch", "numpy", "pandas", "pyarrow"} <= set(run.host["versions"])
        assert run.host["steal_ms"] >= 0

    def test_nothing_in_it_is_a_pickle_and_none_is_read(self, run, monkeypatch):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("unpickled"))
        again = tp.load_run(run.directory)
        assert len(again.losses) == len(again.timeline.steps) == 3
        assert {path.suffix for path in run.directory.iterdir()} <= {".json", ".csv", ".log", ".parquet"}

    def test_one_that_holds_a_run_is_not_written_over(self, run):
        with pytest.raises(SpecError, match="already holds a run"):
            spec(run.directory)


class TestLoadRun:
    def test_it_reads_back_what_tp_run_returned(self, run):
        again = tp.load_run(str(run.directory))
        assert again.spec == run.spec.replaced(directory=None)
        pd.testing.assert_frame_equal(again.timeline.frame, run.timeline.frame)
        pd.testing.assert_frame_equal(again.losses, run.losses)
        assert again.host == run.host

    def test_the_timeline_has_every_action_of_every_step_with_its_tokens(self, run):
        frame = run.timeline.frame
        assert list(frame.columns) == COLUMNS
        assert set(frame["source"]) == {"measured"}
        assert frame.groupby("step").size().to_dict() == {-1: 12, 0: 16, 1: 12, 2: 16}
        assert run.timeline.steps["n_tokens"].to_dict() == {0: 27, 1: 12, 2: 27}
        first = frame.query("step == 0 and rank == 0 and kind == 'F'")
        assert first["slice_tokens"].tolist() == [6, 3, 4, 5]
        assert first["context_tokens"].tolist() == [0, 6, 0, 4]
        assert first["n_sequences"].tolist() == [1, 1, 2, 2]
        assert first["n_bytes"].tolist() == [6 * 8 * 4, 3 * 8 * 4, 2 * 4 * 8 * 4, 2 * 5 * 8 * 4]

    def test_times_are_in_order_and_inputs_are_ready_before_their_action(self, run):
        for _, rows in run.timeline.frame.groupby(["step", "rank"]):
            assert (rows["end_ms"] >= rows["start_ms"]).all()
            assert (rows["start_ms"].to_numpy()[1:] >= rows["end_ms"].to_numpy()[:-1]).all()
            assert (rows["ready_ms"] <= rows["start_ms"]).all()

    def test_each_action_names_the_one_it_waited_for(self, run):
        blocked = run.timeline.frame.query("step == 0 and rank == 1").set_index(["kind", "microbatch", "slice"])["blocked_by"]
        assert blocked["F", 0, 0] == "0F0.0"
        assert blocked["B", 1, 1] == "1F1.1"

    def test_losses_are_a_row_a_measured_step_with_norm_and_speed(self, run):
        losses, steps = run.losses, run.timeline.steps
        assert list(losses.columns) == ["step", "loss", "grad_norm", "tokens_per_second"]
        assert losses["step"].tolist() == [0, 1, 2]
        assert losses["loss"].between(5.0, 6.0).all()  # ln 256 = 5.55
        assert (losses["grad_norm"] > 0).all()
        expected = steps["n_tokens"] / steps["makespan_ms"] * 1e3
        assert losses["tokens_per_second"].to_numpy() == pytest.approx(expected.to_numpy())

    def test_the_summary_has_the_run_in_a_few_numbers(self, run):
        summary = run.summary()
        assert summary["schedule"] == "terapipe"
        assert summary["slicing"] == ", ".join(BOTH)
        assert (summary["source"], summary["n_ranks"], summary["n_steps"]) == ("measured", 2, 3)
        assert summary["step_ms"] == run.timeline.makespan_ms
        assert summary["loss_last"] == run.losses["loss"].iloc[-1]

    def test_where_there_is_no_run_it_says_so(self, tmp_path):
        with pytest.raises(SpecError, match=r"holds no run \(no spec\.json\)\. tp\.runs\(\) lists"):
            tp.load_run(tmp_path / "nothing")


class TestARunThatFailed:
    def test_its_complete_steps_are_read_and_the_last_one_dropped(self, copied):
        """Rank 1 died in the middle of step 2: it wrote less than rank 0."""
        file = copied / "timings-rank-1.csv"
        file.write_text("".join(file.read_text("utf-8").splitlines(keepends=True)[:-3]), "utf-8")
        kept = tp.load_run(copied)
        assert kept.timeline.frame.groupby("step").size().to_dict() == {-1: 12, 0: 16, 1: 12}
        assert kept.losses["step"].tolist() == [0, 1]
        assert kept.summary()["n_steps"] == 2
        assert kept.host == {}

    def test_one_whose_rank_1_never_finished_a_step_says_so_and_is_not_listed(self, copied):
        file = copied / "timings-rank-1.csv"
        file.write_text(file.read_text("utf-8").splitlines(keepends=True)[0], "utf-8")
        with pytest.raises(SpecError, match="holds no whole step"):
            _ = tp.load_run(copied).timeline
        assert tp.runs(copied).empty

    def test_one_that_ended_before_its_first_step_says_so(self, tmp_path):
        directory = prepare(spec(), tmp_path / "run")
        with pytest.raises(SpecError, match="holds no timings: the run ended before its first step"):
            _ = tp.load_run(directory).timeline


class TestRuns:
    def test_it_lists_runs_newest_last_and_leaves_out_those_without_a_step(self, run, copied, tmp_path_factory):
        root = tmp_path_factory.mktemp("listed")
        for name in ("a", "b"):
            (root / name).mkdir()
            for file in copied.iterdir():
                (root / name / file.name).write_bytes(file.read_bytes())
            time.sleep(0.02)
        prepare(spec(), root / "never-ran")
        (root / "of-another-format").mkdir()
        (root / "of-another-format" / "spec.json").write_text('{"format": 99}', "utf-8")
        listed = tp.runs(root)
        assert [Path(name).name for name in listed.index] == ["a", "b"]
        assert listed["n_steps"].tolist() == [3, 3]
        assert listed["step_ms"].tolist() == [run.timeline.makespan_ms] * 2

    def test_where_there_are_none_the_table_is_empty(self, tmp_path):
        assert tp.runs(tmp_path / "nothing").empty

    def test_a_run_without_a_directory_gets_a_new_one_under_runs(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        emulated = {"device": "emulated", "cost": sleeps(1, 1), "n_steps": 1}
        alone = tp.run(spec(**emulated))
        pair = tp.run([spec(**emulated), spec(schedule="gpipe", slicing="[(1, [4])]", **emulated)])
        assert alone.directory.parent == tmp_path / "runs"
        assert alone.directory.name.endswith("-terapipe")
        assert [each.directory.name for each in pair] == ["0-terapipe", "1-gpipe"]
        assert len(tp.runs()) == 3

    def test_names_of_new_directories_never_clash(self, tmp_path):
        made = [new_directory("x", tmp_path) for _ in range(3)]
        assert len(set(made)) == 3


def test_steps_of_several_runs_alternate_in_one_launch_and_each_keeps_its_own_files(tmp_path):
    """Runs that share ranks and device share a launch; others get their own."""
    first, other, third = tp.run(
        [spec(tmp_path / "a", n_steps=2), spec(tmp_path / "b", n_ranks=1, n_steps=1), spec(tmp_path / "c", n_steps=3, seed=1)]
    )
    assert [len(each.timeline.steps) for each in (first, other, third)] == [2, 1, 3]
    assert [each.spec.n_ranks for each in (first, other, third)] == [2, 1, 2]
    alone = tp.run(spec(tmp_path / "alone", n_steps=3, seed=1))
    np.testing.assert_allclose(third.losses["loss"], alone.losses["loss"], atol=1e-6)


def test_another_seed_is_another_run(tmp_path):
    first, second = tp.run([spec(tmp_path / f"{seed}", n_steps=1, seed=seed) for seed in (0, 1)])
    assert first.losses["loss"].iloc[0] != second.losses["loss"].iloc[0]
