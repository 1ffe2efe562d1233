"""Recorded durations in another order and over other links, against the simulator that made them."""

import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import PROPERTY as EVERY_CASE
from strategies import schedules
from test_budget import PER_TOKEN, disturb, draw, draw_options

import terapipe as tp
from terapipe.errors import CostError, ScheduleError, TimelineError
from terapipe.timeline import Timeline

PROPERTY = settings(EVERY_CASE, max_examples=20)
EXACT = {"rel": 1e-9, "abs": 1e-9}
TIMES = ["start_ms", "end_ms"]
KEY = ["step", "stage", "kind", "microbatch", "slice"]
SLICES = tp.uniform_slicing(8, 4, 2)
COST = tp.CallableCost(lambda l, c, b: l + c / 8, lambda l, c, b: 2 * l + c / 3, weight_ms=lambda l, c, b: 0.7 * l)


def build(name: str, n_ranks: int = 3) -> tp.Schedule:
    return tp.build_schedule(name, n_ranks, SLICES)


def times(timeline: Timeline) -> np.ndarray:
    return timeline.frame.sort_values(KEY)[TIMES].to_numpy(np.float64)


def split_halves(schedule: tp.Schedule) -> tp.Schedule:
    """Every B as an I and a W behind it."""
    orders = [
        [text for action in order for text in ([str(action)] if action.kind == "F" else halves(str(action)))]
        for order in schedule.orders
    ]
    return tp.Schedule.from_orders(dict(enumerate(orders)), schedule.slicing)


def halves(text: str) -> list[str]:
    return [text.replace("B", "I"), text.replace("B", "W")]


class TestIdentity:
    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_a_simulation_comes_back_with_the_same_times_and_blockers(self, drawn, seed):
        *_, timeline = draw(drawn, seed, **draw_options(seed))
        again = tp.replay(timeline)
        np.testing.assert_allclose(times(again), times(timeline), rtol=1e-9, atol=1e-9)
        assert again.source == "replayed, simulated"

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_every_measured_step_comes_back_whatever_its_gaps_if_no_start_is_before_its_inputs(self, drawn, seed):
        """Late starts: the simulation again, each action's time stretched, a random part of it before the start."""
        schedule, costs, _ = draw(drawn, seed)
        rng = np.random.default_rng(seed)
        steps = []
        for step in range(3):
            frame = tp.simulate(schedule, costs, tp.Link(rng.random())).frame
            gap = (frame["end_ms"] - frame["start_ms"]) * rng.random(len(frame))
            steps.append(frame.assign(step=step, source="measured", start_ms=frame["start_ms"] + gap))
        timeline = Timeline.from_frame(pd.concat(steps, ignore_index=True))
        again = tp.replay(timeline)
        assert again.source == "replayed"
        assert again.makespan_ms == pytest.approx(timeline.makespan_ms, **EXACT)
        np.testing.assert_allclose(times(again), times(timeline), rtol=1e-9, atol=1e-9)
        assert again.budget().to_dict() == pytest.approx(timeline.budget().to_dict(), rel=1e-6, abs=1e-6)

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_incomplete_and_contradicting_steps_are_replayed_with_their_durations(self, drawn, seed):
        *_, timeline = draw(drawn, seed)
        rough = Timeline.from_frame(disturb(timeline.frame, seed))
        again = tp.replay(rough)
        lengths = [(each.frame.sort_values(KEY)[TIMES] @ [-1, 1]).to_numpy() for each in (rough, again)]
        np.testing.assert_allclose(lengths[1], lengths[0], rtol=1e-9, atol=1e-9)

    def test_warm_up_steps_are_left_out_and_a_replay_of_a_replay_is_called_no_more(self):
        frame = tp.simulate(build("seq1f1b"), COST).frame.assign(source="emulated")
        timeline = Timeline.from_frame(pd.concat([frame.assign(step=step) for step in (-1, 0, 1)]))
        again = tp.replay(timeline)
        assert set(again.frame["step"]) == {0, 1}
        assert again.source == tp.replay(again).source == "replayed, emulated"
        assert not again.is_simulated


class TestOtherOrders:
    @pytest.mark.parametrize("recorded", ["terapipe", "seq1f1b"])
    @pytest.mark.parametrize("wanted", ["terapipe", "seq1f1b"])
    def test_without_gaps_and_messages_it_is_what_the_simulator_says_of_that_order(self, recorded, wanted):
        timeline = tp.simulate(build(recorded), COST)
        expected = tp.simulate(build(wanted), COST)
        again = tp.replay(timeline, build(wanted))
        np.testing.assert_allclose(times(again), times(expected), rtol=1e-9, atol=1e-9)
        assert again.frame["blocked_by"].tolist() == expected.frame["blocked_by"].tolist()

    def test_the_latency_recorded_is_that_of_the_replay(self):
        timeline = tp.simulate(build("terapipe"), COST, tp.Link(0.25))
        expected = tp.simulate(build("seq1f1b"), COST, tp.Link(0.25))
        assert tp.replay(timeline, build("seq1f1b")).makespan_ms == pytest.approx(expected.makespan_ms, **EXACT)

    @pytest.mark.parametrize("recorded", ["gpipe", "1f1b"])
    @pytest.mark.parametrize("wanted", ["gpipe", "1f1b"])
    @pytest.mark.parametrize("overlap", [True, False])
    def test_sends_block_as_they_were_seen_to(self, recorded, wanted, overlap):
        first, second = (tp.build_schedule(name, 3, tp.uniform_slicing(1, 1, 6)) for name in (recorded, wanted))
        timeline = tp.simulate(first, PER_TOKEN, tp.Link(0.25, overlap=overlap))
        expected = tp.simulate(second, PER_TOKEN, tp.Link(0.25, overlap=overlap))
        np.testing.assert_allclose(times(tp.replay(timeline, second)), times(expected), rtol=1e-9, atol=1e-9)

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_the_orders_that_ran_are_no_other_order(self, drawn, seed):
        schedule, _, timeline = draw(drawn, seed, **draw_options(seed))
        late = Timeline.from_frame(timeline.frame.assign(source="measured", end_ms=timeline.frame["end_ms"] + 0.01))
        for each in (timeline, late):
            np.testing.assert_array_equal(times(tp.replay(each, schedule)), times(tp.replay(each)))

    def test_a_backward_takes_what_its_recorded_halves_took(self):
        timeline = tp.simulate(split_halves(build("seq1f1b")), COST)
        expected = tp.simulate(build("terapipe"), COST)
        np.testing.assert_allclose(times(tp.replay(timeline, build("terapipe"))), times(expected), rtol=1e-9, atol=1e-9)

    def test_halves_of_a_backward_recorded_in_one_are_refused_with_the_remedy(self):
        with pytest.raises(TimelineError, match=r"runs 0I1\.3, and step 0 ran 0B1\.3.*a schedule that splits backwards"):
            tp.replay(tp.simulate(build("terapipe"), COST), split_halves(build("terapipe")))

    def test_stages_on_other_ranks_keep_their_durations(self):
        """Two stages from two ranks to one, and back."""
        apart = tp.build_schedule("terapipe", 2, "[(1, [1, 1])]")
        together = tp.Schedule.from_orders({0: "0F0.0 0F0.1 1F0.0 1F0.1 1B0.1 1B0.0 0B0.1 0B0.0"}, "[(1, [1, 1])]")
        timeline = tp.simulate(apart, PER_TOKEN, tp.Link(0.5))
        assert tp.replay(timeline, together).makespan_ms == pytest.approx(12)
        assert tp.replay(tp.replay(timeline, together), apart).makespan_ms == pytest.approx(9)

    def test_every_action_has_the_median_gap_of_the_step(self):
        """Gaps of 0.1, 0.2, 0.3 ms before the second to fourth action of one rank: 0.2 before each in another order."""
        schedule = tp.Schedule.from_orders({0: "0F0 0F1 0B0 0B1"}, tp.uniform_slicing(1, 1, 2))
        starts = np.array([0.0, 1.1, 2.3, 4.6])
        ends = starts + np.array([1, 1, 2, 2])
        frame = tp.simulate(schedule, PER_TOKEN).frame.assign(source="measured", start_ms=starts, end_ms=ends)
        other = tp.Schedule.from_orders({0: "0F0 0B0 0F1 0B1"}, tp.uniform_slicing(1, 1, 2))
        again = tp.replay(Timeline.from_frame(frame), other)
        assert again.frame["start_ms"].tolist() == pytest.approx([0.2, 1.4, 3.6, 4.8])

    @pytest.mark.parametrize(
        ("schedule", "message"),
        [
            (tp.build_schedule("terapipe", 4, SLICES), r"runs 3F0\.0, which is not in step 0: 16 of its 64 actions"),
            (tp.build_schedule("terapipe", 2, SLICES), r"step 0 ran 2F0\.0, which is not in the schedule: 16 such"),
            (tp.build_schedule("terapipe", 3, "[(1, [1, 3, 2, 2])] * 2"), r"0F0\.0 has slice_tokens=1 .* and 2 in step 0"),
            (tp.build_schedule("terapipe", 3, "[(2, [2] * 4)] * 2"), r"0F0\.0 has n_sequences=2 .* and 1 in step 0"),
        ],
    )
    def test_other_stages_and_slices_are_refused_by_name(self, schedule, message):
        with pytest.raises(TimelineError, match=message):
            tp.replay(tp.simulate(build("terapipe"), COST), schedule)

    def test_what_is_no_timeline_or_schedule_is_refused(self):
        with pytest.raises(TimelineError, match="42 is not a timeline"):
            tp.replay(42)
        with pytest.raises(ScheduleError, match="'1f1b' is not a schedule"):
            tp.replay(tp.simulate(build("terapipe"), COST), "1f1b")


class TestOtherLinks:
    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_it_is_what_the_simulator_says_of_that_link(self, drawn, seed):
        rng = random.Random(seed)
        first, second = (
            tp.Link(rng.choice([0.0, 0.4]), rng.choice([1e-3, float("inf")]), rng.random() < 0.5) for _ in range(2)
        )
        schedule, costs, timeline = draw(drawn, seed, link=first, bytes_per_token=9)
        expected = tp.simulate(schedule, costs, second, bytes_per_token=9)
        for given_schedule in (None, schedule):
            again = tp.replay(timeline, given_schedule, second)
            np.testing.assert_allclose(times(again), times(expected), rtol=1e-9, atol=1e-9)

    def test_a_link_takes_the_place_of_one_that_blocked(self):
        """1f1b, 8 and 16 ms, three ranks, six microbatches: 8·8 + 8·16 = 192 ms over a free link, 218 over the blocking one."""
        schedule = tp.build_schedule("1f1b", 3, tp.uniform_slicing(1, 1, 6))
        cost = tp.CallableCost(lambda l, c, b: 8.0, lambda l, c, b: 16.0)
        link = tp.Link(2.0, overlap=False)
        timeline = tp.simulate(schedule, cost, link)
        for each in (timeline, tp.replay(tp.simulate(schedule, cost), link=link)):
            found = [each, tp.replay(each, link=link), tp.replay(each, schedule), tp.replay(each, link=tp.Link())]
            assert [round(again.makespan_ms, 9) for again in found] == [218, 218, 218, 192]

    @pytest.mark.parametrize("link", [5, "fast", {(0, 1): 3}, {"0-1": tp.Link()}])
    def test_what_is_no_link_is_refused_with_its_value(self, link):
        with pytest.raises(CostError, match=r"link=.*: needs a Link"):
            tp.replay(tp.simulate(build("terapipe"), COST), link=link)

    def test_a_mapping_names_every_pair(self):
        timeline = tp.simulate(build("terapipe", 2), COST)
        links = {(0, 1): tp.Link(1.0), (1, 0): tp.Link(2.0)}
        expected = tp.simulate(build("terapipe", 2), COST, links)
        assert tp.replay(timeline, link=links).makespan_ms == pytest.approx(expected.makespan_ms)
        with pytest.raises(CostError, match="no link from rank 1 to rank 0"):
            tp.replay(timeline, link={(0, 1): tp.Link(1.0)})

    def test_a_bandwidth_needs_the_size_of_messages(self):
        with pytest.raises(TimelineError, match=r"does not know the size of its messages"):
            tp.replay(tp.simulate(build("terapipe"), COST), link=tp.Link(bandwidth_gb_s=1.0))

    def test_links_need_ranks_from_0(self):
        frame = tp.simulate(build("terapipe", 2), COST).frame
        with pytest.raises(TimelineError, match=r"this timeline has the ranks \[1, 2\]"):
            tp.replay(Timeline.from_frame(frame.assign(rank=frame["rank"] + 1)), link=tp.Link(1.0))
