"""Profiles: the grid that is planned, and the table that ranks measure on it."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY
from tiny import MODEL

import terapipe as tp
from terapipe.errors import CostError, RunError, TerapipeError
from terapipe.profiling import plan_points

pytestmark = pytest.mark.timeout(60)
LENGTHS = [8, 16, 32, 64]


@pytest.fixture(scope="module")
def profile() -> tp.Profile:
    """A tiny model on two ranks; three layers on the first."""
    return tp.profile(MODEL, seq_tokens=64, n_ranks=2, slice_tokens=LENGTHS, n_repeats=2, layers_per_stage=[3, 1])


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
            MODEL, seq_tokens=16, n_ranks=1, slice_tokens=[8], n_sequences=3, n_repeats=1, dtype="float64",
            stage="thin_stage:ThinStage",
        )  # fmt: skip
        assert set(one.frame["n_sequences"]) == {3}
        assert set(one.frame["stage"]) == {0}
        assert one.about["dtype"] == "float64"


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
        ],
    )
    def test_what_cannot_be_measured_is_refused_before_any_process_starts(self, values, said, monkeypatch):
        monkeypatch.setattr("terapipe.engine.launch.start_processes", lambda **_: pytest.fail("a process was started"))
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
