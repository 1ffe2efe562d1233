"""The timings table: its metrics against closed forms, and what it needs of a table."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import split
from strategies import PROPERTY, schedules

import terapipe as tp
from terapipe.errors import TimelineError
from terapipe.timeline import COLUMNS, Timeline, name_blockers

EXACT = {"rel": 1e-9, "abs": 1e-9}
WHOLE = tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: 2.0)

#   rank 0   F0 F0 .. .. B0 B0      one microbatch on two ranks, a column a millisecond
#   rank 1   .. .. F0 B0
GIVEN = pd.DataFrame(
    [(0, "F", 0, 0, 0.0, 2.0), (0, "B", 0, 0, 4.0, 6.0), (1, "F", 0, 0, 2.0, 3.0), (1, "B", 0, 0, 3.0, 4.0)],
    columns=["rank", "kind", "microbatch", "slice", "start_ms", "end_ms"],
)


def several_steps(scales: dict[int, float], tokens: int = 8) -> pd.DataFrame:
    """`GIVEN` once a step, its times multiplied."""
    return pd.concat(
        [
            GIVEN.assign(step=step, start_ms=GIVEN["start_ms"] * scale, end_ms=GIVEN["end_ms"] * scale, slice_tokens=tokens)
            for step, scale in scales.items()
        ],
        ignore_index=True,
    )


def draw_simulation(drawn, seed, **options) -> tuple[list[list[str]], Timeline]:
    """A random schedule with random times, no two alike."""
    orders, slicing = drawn
    schedule = tp.Schedule.from_orders(dict(enumerate(orders)), slicing)
    rng = np.random.default_rng(seed)
    tables = rng.random((schedule.n_stages, 3, 10, 10)) + 0.1
    costs = [
        tp.CallableCost(
            lambda l, c, b, t=t: t[0, l, c],
            lambda l, c, b, t=t: t[1, l, c] + t[2, l, c],
            weight_ms=lambda l, c, b, t=t: t[2, l, c],
        )
        for t in tables
    ]
    return orders, tp.simulate(schedule, costs, **options)


class TestMetrics:
    @pytest.mark.parametrize("n_ranks", [1, 2, 4, 8])
    @pytest.mark.parametrize("k", [1, 2, 4])
    def test_bubble_fraction_is_p_minus_1_over_km_plus_p_minus_1_and_overhead_p_minus_1_over_km(self, n_ranks, k):
        for m in (1, 2, 16):
            timeline = tp.simulate(tp.build_schedule("terapipe", n_ranks, tp.uniform_slicing(8, k, m)), WHOLE)
            assert timeline.bubble_fraction == pytest.approx((n_ranks - 1) / (k * m + n_ranks - 1), **EXACT)
            assert timeline.bubble_overhead == pytest.approx((n_ranks - 1) / (k * m), **EXACT)
            assert timeline.n_ranks == n_ranks

    def test_1f1b_of_16_microbatches_on_8_ranks_has_an_overhead_of_7_over_16(self):  # 0.4375, TeraPipe and Seq1F1B settings
        timeline = tp.simulate(tp.build_schedule("1f1b", 8, tp.uniform_slicing(8, 1, 16)), WHOLE)
        assert timeline.bubble_overhead == pytest.approx(0.4375, **EXACT)
        assert timeline.bubble_fraction == pytest.approx(7 / 23, **EXACT)

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_fraction_and_overhead_are_the_same_idle_time_over_two_bases(self, drawn, seed):
        _, timeline = draw_simulation(drawn, seed)
        rows = timeline.frame
        busy = (rows["end_ms"] - rows["start_ms"]).sum()
        idle = timeline.n_ranks * timeline.makespan_ms - busy
        assert timeline.makespan_ms == rows["end_ms"].max()
        assert timeline.bubble_fraction == pytest.approx(idle / (timeline.n_ranks * timeline.makespan_ms), **EXACT)
        assert timeline.bubble_overhead == pytest.approx(idle / busy, **EXACT)

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_a_unit_is_in_flight_from_its_f_to_its_b_or_w(self, drawn, seed):
        orders, timeline = draw_simulation(drawn, seed)
        peaks = []
        for order in orders:
            held = [0]
            for text in order:
                held.append(held[-1] + {"F": 1, "B": -1, "I": 0, "W": -1}[split(text)[1]])
            peaks.append(max(held))
        found = timeline.peak_in_flight()
        assert found.index.tolist() == list(range(len(orders)))
        assert found.tolist() == peaks

    def test_tokens_per_second_counts_the_tokens_of_all_sequences_once(self):
        slicing = tp.Slicing.parse("[(3, [2, 1]), (1, [3])]")
        timeline = tp.simulate(tp.build_schedule("terapipe", 2, slicing), WHOLE)
        assert timeline.makespan_ms == 12.0
        assert timeline.tokens_per_second == pytest.approx(12 / 12e-3)

    def test_the_steps_table_has_a_row_a_step(self):
        steps = Timeline.from_frame(several_steps({0: 1.0, 1: 2.0})).steps
        assert steps.index.tolist() == [0, 1]
        assert steps["makespan_ms"].tolist() == [6.0, 12.0]
        assert steps["busy_ms"].tolist() == [6.0, 12.0]
        assert steps["n_tokens"].tolist() == [8, 8]


class TestSteps:
    def test_metrics_are_medians_over_the_steps_from_0_on(self):
        timeline = Timeline.from_frame(several_steps({-2: 1000.0, -1: 500.0, 0: 1.0, 1: 10.0, 2: 2.0}))
        assert timeline.makespan_ms == 12.0
        assert timeline.tokens_per_second == pytest.approx(8 / 12e-3)
        assert timeline.bubble_fraction == pytest.approx(0.5)
        assert timeline.bubble_overhead == pytest.approx(1.0)
        assert timeline.steps.index.tolist() == [0, 1, 2]
        assert set(timeline.measured["step"]) == {0, 1, 2}
        assert set(timeline.frame["step"]) == {-2, -1, 0, 1, 2}

    def test_one_slow_step_in_three_does_not_move_them(self):
        assert Timeline.from_frame(several_steps({0: 1.0, 1: 100.0, 2: 1.0})).makespan_ms == 6.0

    def test_with_warm_up_steps_only_they_are_all_there_is(self):
        assert Timeline.from_frame(several_steps({-1: 1.0})).makespan_ms == 6.0

    def test_a_warm_up_steps_units_do_not_count_in_the_peak(self):
        extra = GIVEN.iloc[[0, 0]].assign(step=-1, microbatch=[1, 2])
        timeline = Timeline.from_frame(pd.concat([GIVEN.assign(step=0), extra]))
        assert timeline.peak_in_flight().tolist() == [1, 1]

    def test_a_step_that_starts_late_counts_from_its_first_action(self):
        late = GIVEN.assign(start_ms=GIVEN["start_ms"] + 5, end_ms=GIVEN["end_ms"] + 5)
        timeline = Timeline.from_frame(late)
        assert timeline.makespan_ms == 6.0
        assert timeline.bubble_fraction == pytest.approx(0.5)
        assert timeline.budget().sum() == pytest.approx(12.0)


class TestFromFrame:
    def test_what_is_not_given_is_one_step_of_given_times_on_a_stage_a_rank(self):
        frame = Timeline.from_frame(GIVEN).frame
        assert frame.columns.tolist() == COLUMNS
        assert set(frame["source"]) == {"given"}
        assert set(frame["step"]) == {0}
        assert frame["stage"].tolist() == frame["rank"].tolist()
        assert set(frame["n_sequences"]) == {1}
        assert set(frame["n_bytes"]) == {0}
        assert frame["ready_ms"].isna().all()
        assert frame["blocked_by"].tolist() == ["", "1B0.0", "0F0.0", "1F0.0"]
        assert Timeline.from_frame(GIVEN).source == "given"

    def test_rows_in_any_order_give_the_same_timeline_and_the_table_given_is_left_alone(self):
        shuffled = GIVEN.iloc[[3, 1, 0, 2]]
        before = shuffled.copy()
        pd.testing.assert_frame_equal(Timeline.from_frame(shuffled).frame, Timeline.from_frame(GIVEN).frame)
        pd.testing.assert_frame_equal(shuffled, before)

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_a_simulated_table_comes_back_unchanged(self, drawn, seed):
        _, timeline = draw_simulation(drawn, seed)
        pd.testing.assert_frame_equal(Timeline.from_frame(timeline.frame).frame, timeline.frame)
        assert timeline.source == "simulated"

    def test_tables_of_two_sources_are_mixed(self):
        both = pd.concat([GIVEN.assign(source="simulated", step=0), GIVEN.assign(source="measured", step=1)])
        assert Timeline.from_frame(both).source == "mixed"

    @pytest.mark.parametrize("name", ["rank", "kind", "microbatch", "slice", "start_ms", "end_ms"])
    def test_a_missing_column_is_refused_by_name(self, name):
        with pytest.raises(TimelineError, match=rf"column\(s\) \['{name}'\]"):
            Timeline.from_frame(GIVEN.drop(columns=name))

    def test_no_rows_unknown_kinds_and_time_running_backwards_are_refused(self):
        with pytest.raises(TimelineError, match="at least one row"):
            Timeline.from_frame(GIVEN.iloc[:0])
        with pytest.raises(TimelineError, match=r"kinds \['SEND_F', 'X'\].*allowed: \['F', 'B', 'I', 'W'\]"):
            Timeline.from_frame(GIVEN.assign(kind=["F", "X", "SEND_F", "X"]))
        with pytest.raises(TimelineError, match=r"ends before it starts.*'end_ms': -1\.0"):
            Timeline.from_frame(GIVEN.assign(end_ms=[2.0, 6.0, -1.0, 4.0]))
        with pytest.raises(TimelineError, match="ends before it starts"):
            Timeline.from_frame(GIVEN.assign(start_ms=[np.nan, 4.0, 2.0, 3.0]))

    def test_an_incomplete_table_needs_from_frame(self):
        with pytest.raises(TimelineError, match="from_frame"):
            Timeline(GIVEN)


def test_a_table_that_has_an_action_twice_names_no_blockers_and_refuses_a_budget():
    timeline = Timeline.from_frame(pd.concat([GIVEN, GIVEN.iloc[[0]]]))
    assert set(timeline.frame["blocked_by"]) == {""}
    for refused in (timeline.budget, timeline.critical_path):
        with pytest.raises(TimelineError, match=r"an action is in a step twice.*'stage': 0.*column `step`"):
            refused()


@given(schedules(), st.integers(0, 2**32))
@PROPERTY
def test_blockers_named_from_measured_ends_are_those_the_simulator_saw(drawn, seed):
    """Times no two of which are alike leave one answer."""
    _, timeline = draw_simulation(drawn, seed)
    assert list(name_blockers(timeline.frame)) == timeline.frame["blocked_by"].tolist()
