"""Profiles: the grid that is planned, the table that ranks measure on it, and when it is settled."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY
from tiny import MODEL

import terapipe as tp
from terapipe.engine.claim import claim
from terapipe.engine.clock import Clock, EventClock, check_device
from terapipe.engine.launch import Ranks
from terapipe.engine.mesh import Mesh
from terapipe.engine.probe import Prober, time_slice
from terapipe.engine.rank import build_stage
from terapipe.engine.results import prepare
from terapipe.errors import CostError, RunError, SpecError, TerapipeError
from terapipe.experiment.predictions import splits_backward
from terapipe.profiling import measure, plan_points

pytestmark = pytest.mark.timeout(60)
LENGTHS = [8, 16, 32, 64]


@pytest.fixture(scope="module")
def profile() -> tp.Profile:
    """A tiny model on two ranks; three layers on the first."""
    return tp.profile(
        MODEL, seq_tokens=64, n_ranks=2, slice_tokens=LENGTHS, n_repeats=2, max_repeats=2, layers_per_stage=[3, 1]
    )


class TestPlanPoints:
    @given(st.integers(1, 4096), st.integers(1, 4))
    @PROPERTY
    def test_lengths_reach_from_a_sixteenth_to_the_whole_each_alone_and_behind_all_that_is_left(self, seq_tokens, n_sequences):
        points = plan_points(seq_tokens, n_sequences=n_sequences)
        lengths = {length for length, _, _ in points}
        assert (min(lengths), max(lengths)) == (max(1, round(seq_tokens / 16)), seq_tokens)
        assert len(points) == len(set(points))
        for length, context, sequences in points:
            assert length >= 1
            assert context >= 0
            assert length + context <= seq_tokens
            assert sequences == n_sequences
        for length in lengths:
            assert {(length, 0, n_sequences), (length, seq_tokens - length, n_sequences)} <= set(points)

    def test_given_lengths_are_measured_alone_and_behind_a_half_and_all_of_the_rest(self):
        assert plan_points(100, [50, 20, 50]) == [(20, 0, 1), (20, 40, 1), (20, 80, 1), (50, 0, 1), (50, 25, 1), (50, 50, 1)]

    @pytest.mark.parametrize("lengths", [[], [0, 8], [-1], [8, 65]])
    def test_lengths_outside_the_sequence_are_refused_quoting_them(self, lengths):
        with pytest.raises(CostError) as refusal:
            plan_points(64, lengths)
        assert f"slice_tokens={lengths}" in str(refusal.value)
        assert "1 to seq_tokens=64" in str(refusal.value)


class TestProfile:
    def test_every_point_is_measured_on_every_stage_alone_and_some_with_all_ranks_at_once(self, profile):
        frame, place = profile.frame, ["stage", "slice_tokens", "context_tokens", "n_sequences"]
        assert {*place, "together", "repeat", "forward_ms", "backward_ms"} == set(frame.columns)
        alone, together = (frame[frame["together"] == both] for both in (False, True))
        planned = {(stage, *point) for stage in (0, 1) for point in plan_points(64, LENGTHS)}
        assert set(alone[place].itertuples(index=False, name=None)) == planned
        shared = set(together[place].itertuples(index=False, name=None))
        assert shared <= planned
        assert {stage for stage, *_ in shared} == {0, 1}
        assert (frame.groupby([*place, "together"])["repeat"].nunique() == 2).all()
        assert len(frame) == 2 * (len(planned) + len(shared))

    def test_times_are_positive_and_three_layers_cost_more_than_one(self, profile):
        assert (profile.frame[["forward_ms", "backward_ms"]] > 0).all().all()
        fastest = profile.frame.groupby(["stage", "slice_tokens", "context_tokens"])["backward_ms"].min().groupby("stage").sum()
        assert fastest[0] > fastest[1]

    def test_it_says_what_was_measured_where(self, profile):
        about = profile.about
        assert about["model"] == MODEL.to_dict()
        assert about["layers"] == [[0, 3], [3, 4]]
        assert (about["n_ranks"], about["threads_per_rank"], about["dtype"]) == (2, 1, "float32")
        assert about["host"]["versions"]["torch"]
        assert about["steal_ms"] >= 0

    def test_contention_is_at_least_1_and_the_raw_value_is_kept(self, profile):
        assert profile.contention == max(1.0, profile.contention_raw)
        assert profile.contention_raw > 0

    def test_its_fit_plans_a_slicing_and_its_simulation(self, profile):
        plan = tp.optimal_slicing(profile.fit(), 64, 2, granularity_tokens=8, min_slice_tokens=8)
        schedule = tp.build_schedule("terapipe", 2, plan.slicing)
        timeline = tp.simulate(schedule, [profile.fit(0), profile.fit(1)], contention=profile.contention)
        assert plan.slicing.seq_tokens == 64
        assert timeline.makespan_ms > 0
        same = tp.simulate(schedule, profile.fit())
        assert same.makespan_ms == pytest.approx(plan.latency_ms)
        assert len(profile.held_out_error()) == 2

    def test_it_comes_back_from_disk(self, profile, tmp_path):
        back = tp.Profile.load(profile.save(tmp_path / "deep" / "tiny.csv"))
        pd.testing.assert_frame_equal(back.frame, profile.frame)
        assert back.about == profile.about
        assert back.fit().step_ms(16, 16) == pytest.approx(profile.fit().step_ms(16, 16))

    def test_sequences_dtype_and_a_stage_of_ones_own_are_taken(self):
        one = tp.profile(
            MODEL, seq_tokens=16, n_ranks=1, slice_tokens=[8], n_sequences=3, n_repeats=1, max_repeats=1, dtype="float64",
            stage="thin_stage:ThinStage",
        )  # fmt: skip
        assert set(one.frame["n_sequences"]) == {3}
        assert set(one.frame["stage"]) == {0}
        assert one.about["dtype"] == "float64"


class TestSplitBackward:
    def test_the_halves_are_measured_beside_the_whole_and_the_fit_and_table_know_them(self):
        values = {"slice_tokens": LENGTHS, "n_repeats": 2, "max_repeats": 2, "split_backward": True}
        found = tp.profile(MODEL, seq_tokens=64, **values)
        assert found.kinds == ("forward", "backward", "input", "weight")
        assert (found.frame[["forward_ms", "backward_ms", "input_ms", "weight_ms"]] > 0).all().all()
        medians = found.medians(0).set_index(["slice_tokens", "context_tokens"])
        for cost in (found.table(0), found.fit(0)):
            assert cost.input_ms(16, 0) == pytest.approx(medians.loc[(16, 0), "input_ms"])
        assert found.fit(0).weight_ms(16, 0) == found.fit(0).weight_ms(16, 48) == medians.loc[16, "weight_ms"].mean()
        assert found.report().index.tolist() == list(found.kinds)

    def test_an_interrupted_measurement_with_halves_goes_on_and_is_another_than_one_without(self, tmp_path):
        values = {"slice_tokens": [8, 16], "n_repeats": 1, "max_repeats": 1, "directory": tmp_path}
        first = tp.profile(MODEL, 32, split_backward=True, **values)
        pd.testing.assert_frame_equal(tp.profile(MODEL, 32, split_backward=True, **values).frame, first.frame)
        with pytest.raises(CostError, match="split_backward is True there and None here"):
            tp.profile(MODEL, 32, **values)

    def test_the_committed_profile_without_halves_still_says_half_each(self):
        cost = tp.Profile.load(Path(__file__).parents[1] / "data/profiles/tour-two-cores.csv").fit()
        assert cost.weight_ms(256, 256) == cost.backward_ms(256, 256) / 2

    def test_each_stage_is_measured_on_the_rank_where_the_schedule_puts_it_also_where_ranks_have_unlike_many(self, tmp_path):
        orders = {0: ["0F0", "3F0", "3I0", "3W0", "0B0"], 1: ["1F0", "2F0", "2B0", "1B0"]}
        unlike = {0: ["0F0", "1F0", "3F0", "3B0", "1B0", "0B0"], 1: ["2F0", "2B0"]}
        with Ranks(2, tmp_path) as ranks:
            for rows, homes in ((orders, [[0, 3], [1, 2]]), (unlike, [[0, 1, 3], [2]])):
                schedule = tp.Schedule.from_orders(rows, "[(1, [16])]")
                spec = tp.RunSpec(MODEL, schedule.slicing, schedule)
                found = measure(ranks, spec, plan_points(16, [8]), 2, tmp_path, splits_backward([spec]))
                files = [pd.read_csv(file) for file in sorted(tmp_path.glob("**/probe-rank-*.csv"))][-2:]
                assert [sorted(file["stage"].unique()) for file in files] == homes
                assert (found.frame.groupby(["stage", "slice_tokens", "context_tokens", "together"]).size() == 2).all()
                assert found.kinds[2:] == (("input", "weight") if rows is orders else ())


class TestSettling:
    def test_it_stops_at_the_least_number_of_repeats_once_the_medians_are_settled(self):
        found = tp.profile(MODEL, 16, n_ranks=1, slice_tokens=[8], n_repeats=3, max_repeats=40, tolerance=np.float32(1e6))
        assert found.frame["repeat"].nunique() == found.about["n_repeats"] == 3
        assert found.about["settled"]
        assert found.about["median_error"] <= found.about["tolerance"] == 1e6

    def test_it_goes_on_to_the_most_where_they_never_settle_and_says_so(self):
        found = tp.profile(MODEL, 16, n_ranks=2, slice_tokens=[8], n_repeats=2, max_repeats=5, tolerance=0)
        assert (found.frame.groupby(["stage", "context_tokens", "together"])["repeat"].nunique() == 5).all()
        assert found.about["n_repeats"] == 5
        assert not found.about["settled"]

    def test_one_repeat_settles_nothing(self):
        found = tp.profile(MODEL, 16, n_ranks=1, slice_tokens=[8], n_repeats=1, max_repeats=1, tolerance=1e6)
        assert found.about["median_error"] is None
        assert not found.about["settled"]

    def test_the_90th_percentile_over_points_decides(self, tmp_path):
        prober = one_rank_prober(tmp_path, plan_points(64, [4, 8, 12, 16, 20]))
        calm, wild = np.array([[1.0, 1.0]] * 4), np.array([[1.0, 1.0], [9.0, 9.0]] * 2)
        cells = list(prober.times)
        for index, cell in enumerate(cells):
            prober.times[cell] = (wild if index == 0 else calm).tolist()
        assert prober.progress() == (4, 0.0)  # 1 of 15
        for cell in cells[:2]:
            prober.times[cell] = wild.tolist()
        n_repeats, error = prober.progress()
        assert n_repeats == 4
        assert error > 0.5


class TestResuming:
    ARGUMENTS: ClassVar = {"model": MODEL, "seq_tokens": 32, "slice_tokens": [8, 16], "n_repeats": 2, "max_repeats": 2}

    def test_a_second_call_goes_on_from_what_is_there(self, tmp_path):
        first = tp.profile(**self.ARGUMENTS, directory=tmp_path / "kept")
        again = tp.profile(**self.ARGUMENTS, directory=tmp_path / "kept")
        pd.testing.assert_frame_equal(again.frame, first.frame)
        more = tp.profile(**self.ARGUMENTS | {"n_repeats": 3, "max_repeats": 3}, directory=str(tmp_path / "kept"))
        assert more.about["n_repeats"] == 3
        merged = first.frame.merge(more.frame, how="left", indicator=True)
        assert (merged["_merge"] == "both").all()
        assert len(more.frame) == len(first.frame) / 2 * 3

    def test_rows_of_a_repeat_that_was_cut_short_count_and_a_torn_line_does_not(self, tmp_path):
        first = tp.profile(**self.ARGUMENTS, directory=tmp_path)
        file = tmp_path / "probe-rank-1.csv"
        file.write_bytes(file.read_bytes()[:-9])  # its last row torn
        more = tp.profile(**self.ARGUMENTS, directory=tmp_path)
        counts = more.frame.groupby(["stage", "slice_tokens", "context_tokens", "together"]).size()
        assert counts.min() == 2  # a whole repeat more on all ranks, as a point of rank 1 had only one
        assert sorted(counts.unique()) == [2, 3]
        whole = first.frame.iloc[:-1]
        assert (whole.merge(more.frame, how="left", indicator=True)["_merge"] == "both").all()
        assert (more.frame[["forward_ms", "backward_ms"]] > 0).all().all()

    def test_nothing_measured_is_lost_when_the_measuring_process_is_killed(self, tmp_path):
        code = (
            "import terapipe as tp\nfrom tiny import MODEL\n"
            f"tp.profile(MODEL, 32, slice_tokens=[8, 16], n_repeats=10**6, directory={str(tmp_path)!r})"
        )
        process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
        files = [tmp_path / f"probe-rank-{rank}.csv" for rank in (0, 1)]
        deadline = time.monotonic() + 40
        while not all(file.exists() and file.stat().st_size > 3000 for file in files):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(1)  # the ranks end when their line to the process does
        kept = [file.read_text("utf-8").rpartition("\n")[0].splitlines()[1:] for file in files]
        time.sleep(0.5)
        assert [file.read_text("utf-8").rpartition("\n")[0].splitlines()[1:] for file in files] == kept
        more = tp.profile(**self.ARGUMENTS, directory=tmp_path)
        assert len(more.frame) >= sum(map(len, kept))
        for file, rows in zip(files, kept, strict=True):
            assert file.read_text("utf-8").splitlines()[1 : len(rows) + 1] == rows

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"model": tp.ModelConfig(4, 16, 2, max_seq_tokens=64)}, "spec.model.d_model is 8 there and 16 here"),
            ({"slice_tokens": [8]}, "points is"),
            ({"n_ranks": 1}, "n_ranks is 2 there and 1 here"),
            ({"dtype": "float64"}, "spec.dtype is float32 there and float64 here"),
        ],
    )
    def test_another_measurement_in_its_place_is_refused_naming_the_difference(self, values, said, tmp_path, no_processes):
        with pytest.raises(AssertionError):
            tp.profile(**self.ARGUMENTS, directory=tmp_path)
        with pytest.raises(CostError) as refusal:
            tp.profile(**self.ARGUMENTS | values, directory=tmp_path)
        assert said in str(refusal.value)
        assert str(tmp_path) in str(refusal.value)

    def test_a_claim_that_was_stopped_before_its_renaming_is_made_again(self, tmp_path):
        (tmp_path / "measured.json.new").write_text('{"n_ra', "utf-8")
        claim(tmp_path, {"n_ranks": 2})
        assert [each.name for each in tmp_path.iterdir()] == ["measured.json"]
        claim(tmp_path, {"n_ranks": 2})
        (tmp_path / "measured.json").rename(tmp_path / "measured.json.new")
        (tmp_path / "thesis.tex").write_text("", "utf-8")
        with pytest.raises(CostError, match="something else"):
            claim(tmp_path, {"n_ranks": 2})

    def test_a_directory_with_other_things_is_refused(self, tmp_path, no_processes):
        (tmp_path / "thesis.tex").write_text("", "utf-8")
        with pytest.raises(CostError, match="something else"):
            tp.profile(**self.ARGUMENTS, directory=tmp_path)
        with pytest.raises(CostError, match="something else"):
            tp.profile(**self.ARGUMENTS, directory=tmp_path / "thesis.tex")


class TestOneRank:
    def test_one_process_measures_every_stage_and_leaves_contention_unknown(self):
        found = tp.profile(MODEL, 64, n_ranks=1, n_stages=4, slice_tokens=LENGTHS, n_repeats=2, max_repeats=2)
        assert sorted(found.frame["stage"].unique()) == [0, 1, 2, 3]
        assert not found.frame["together"].any()
        assert found.about["layers"] == [[0, 1], [1, 2], [2, 3], [3, 4]]
        assert found.about["n_ranks"] == 1
        assert found.fit(3).step_ms(16, 16) > 0
        with pytest.raises(CostError, match="n_ranks=2 or more"):
            _ = found.contention

    def test_two_processes_deal_four_stages_between_them(self):
        found = tp.profile(MODEL, 16, n_ranks=2, n_stages=4, slice_tokens=[8], n_repeats=1, max_repeats=1)
        for together in (False, True):
            assert sorted(found.frame[found.frame["together"] == together]["stage"].unique()) == [0, 1, 2, 3]

    def test_a_lone_rank_makes_no_process_group(self):
        mesh = Mesh(None, 0, 1)
        assert not dist.is_initialized()
        assert mesh.gather("here") == ["here"]
        assert mesh.sum(torch.tensor([3.0])).item() == 3.0
        mesh.barrier()
        assert abs(mesh.start_together() - time.perf_counter_ns()) < 1e9
        mesh.close()

    def test_a_lone_rank_trains_a_whole_run(self, tmp_path):
        report = tp.verify(tp.RunSpec(MODEL, "[(1, [4, 3, 5])]", n_ranks=1, dtype="float64", directory=tmp_path / "run"))
        assert report["max_relative_error"].max() < 1e-9


class StubEvent:
    """torch.cuda.Event as far as the clock needs it: a queue in which the time is noted on synchronize."""

    queue: ClassVar[list["StubEvent"]] = []
    settled: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "an event without timing knows no time"
        self.at: float | None = None

    def record(self) -> None:
        StubEvent.queue.append(self)

    def elapsed_time(self, other: "StubEvent") -> float:
        assert self.at is not None, "asked before the device had settled"
        assert other.at is not None, "asked before the device had settled"
        return other.at - self.at

    @classmethod
    def synchronize(cls, device: object = None) -> None:
        cls.settled.append("synchronize")
        for place, event in enumerate(cls.queue):
            event.at = 5.0 * place**2  # 0, 5, 20: 5 ms forward, 15 ms backward
        cls.queue.clear()


class TestClock:
    def test_cuda_slices_lie_between_three_events_read_once_the_device_has_settled(self, monkeypatch, tmp_path):
        monkeypatch.setattr(torch.cuda, "Event", StubEvent)
        monkeypatch.setattr(torch.cuda, "synchronize", StubEvent.synchronize)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        clock = EventClock(0)
        assert clock.device == torch.device("cuda", 0)
        clock.device = torch.device("cpu")  # events of a stub, tensors where they can be
        stage = build_stage(tp.RunSpec(MODEL, "[(1, [16])]"), 0)
        monkeypatch.setattr(StubEvent, "settled", [])
        assert time_slice(stage, (4, 8, 1), 16, 256, clock) == (5.0, 15.0)
        assert StubEvent.settled == ["synchronize"] * 2  # before the first event, after the last

    def test_a_cpus_marks_are_those_of_its_own_clock(self):
        clock = Clock()
        assert clock.between_ms(1.0, 1.25) == 250.0
        assert clock.mark() <= clock.mark()

    @pytest.mark.parametrize("index", [0, 1, 2])
    @pytest.mark.parametrize("model", [MODEL, tp.ModelConfig(3, 16, 4, n_kv_heads=2, position="rotary", dropout=0.1)])
    def test_everything_a_slice_needs_is_placed_on_its_device(self, model, index, monkeypatch):
        """On the "meta" device, where operations with a tensor that was left on the CPU are refused."""
        meta = SimpleNamespace(device=torch.device("meta"), settle=Clock.settle, mark=lambda: 0, between_ms=lambda *_: 1.0)
        meta.settle = lambda: None
        stage = build_stage(tp.RunSpec(model, "[(1, [16])]", n_ranks=3), index, meta.device)
        assert {parameter.device.type for parameter in stage.module.parameters()} == {"meta"}
        for point in ((16, 0, 2), (4, 8, 2), (4, 12, 1)):
            assert time_slice(stage, point, 16, model.vocab_size, meta) == (1.0, 1.0)
        assert {parameter.grad.device.type for parameter in stage.module.parameters()} == {"meta"}
        buffers = [buffer for free in stage.pool.free.values() for buffer in free]
        assert {buffer.rows.device.type for buffer in buffers} == {"meta"}

    def test_without_cuda_it_is_refused_before_any_process_starts(self, no_processes, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SpecError, match="device='cuda': torch sees no CUDA device"):
            tp.profile(MODEL, device="cuda")

    def test_more_ranks_than_cuda_devices_are_refused_with_the_way_out(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        check_device("cuda", 1)
        with pytest.raises(SpecError, match=r"2 ranks for 1 CUDA device\(s\).*n_ranks=1; n_stages may be larger"):
            check_device("cuda", 2)


def one_rank_prober(directory: Path, points) -> Prober:
    """A prober in this process, which measures one stage."""
    prepare(tp.RunSpec(MODEL, "[(1, [64])]", n_ranks=1), directory)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    prober = Prober(Mesh(None, 0, 1), directory, points, [])
    if cores:
        os.sched_setaffinity(0, cores)  # the mesh pins its rank
    return prober


@pytest.fixture
def no_processes(monkeypatch):
    """Starting a process fails the test."""

    def refuse(**_):
        raise AssertionError("a process was started")

    monkeypatch.setattr("terapipe.engine.launch.start_processes", refuse)


class TestRefusals:
    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"n_ranks": 5}, "5 stages for 4 layers"),
            ({"seq_tokens": 65}, "65 tokens"),
            ({"seq_tokens": 0}, "seq_tokens=0"),
            ({"slice_tokens": [65]}, "slice_tokens=[65]"),
            ({"dtype": "float16"}, "unknown dtype 'float16'"),
            ({"layers_per_stage": [4]}, "names 1 stages; there are 2"),
            ({"stage": "no_such:Stage"}, "no module 'no_such'"),
            ({"n_repeats": 0}, "n_repeats=0"),
            ({"n_repeats": 4, "max_repeats": 3}, "max_repeats=3 is below n_repeats=4"),
            ({"tolerance": -0.1}, "tolerance=-0.1"),
            ({"tolerance": np.float64("nan")}, "tolerance=np.float64(nan)"),
            ({"tolerance": True}, "tolerance=True"),
            ({"tolerance": "3 %"}, "tolerance='3 %'"),
            ({"n_stages": 3}, "n_stages=3 is not a multiple of n_ranks=2"),
            ({"n_stages": 0}, "n_stages=0"),
            ({"n_ranks": 0, "n_stages": 2}, "n_ranks=0"),
            ({"device": "tpu"}, "unknown device 'tpu'"),
        ],
    )
    def test_what_cannot_be_measured_is_refused_before_any_process_starts(self, values, said, no_processes):
        with pytest.raises(TerapipeError) as refusal:
            tp.profile(MODEL, **values)
        assert said in str(refusal.value)

    def test_a_rank_that_fails_while_measuring_is_named(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        head = "from terapipe.engine.model import DecoderStage\nclass Breaks(DecoderStage):\n"
        code = f"{head}    def forward(self, *_):\n        raise ValueError('my own words')\n"
        (tmp_path / "breaking_stage.py").write_text(code, "utf-8")
        with pytest.raises(RunError, match="rank 0 failed: ValueError: my own words") as failure:
            tp.profile(MODEL, seq_tokens=16, stage="breaking_stage:Breaks")
        assert failure.value.rank == 0
