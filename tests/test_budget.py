"""Where time went: parts that add up on every timeline, each what its own cause cost, and the path that ends last."""

import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import contended_times, split, times
from strategies import PROPERTY as EVERY_CASE
from strategies import schedules
from tiny import SLICED, sleeps, spec

import terapipe as tp
from terapipe.errors import CostError, TimelineError
from terapipe.timeline import BUDGET, Timeline

PROPERTY = settings(EVERY_CASE, max_examples=20)  # a budget is up to six replays
EXACT = {"rel": 1e-9, "abs": 1e-9}
PER_TOKEN = tp.CallableCost(lambda l, c, b: l, lambda l, c, b: 2 * l)  # slices take their share of the whole
PER_SLICE = tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: 2.0)  # and here as long as the whole
POINT = ["slice_tokens", "context_tokens", "n_sequences", "forward_ms", "backward_ms"]
SPLIT = ["useful", "slicing_overhead", "contention"]
OTHERS = ["communication", "dependency", "fill", "drain", "runtime", "unexplained"]


def random_costs(n_stages: int, seed: int) -> list[tp.CallableCost]:
    """A table of times a stage, no two alike."""
    rng = np.random.default_rng(seed)
    return [
        tp.CallableCost(
            lambda l, c, b, t=t: t[0, l, c],
            lambda l, c, b, t=t: t[1, l, c] + t[2, l, c],
            weight_ms=lambda l, c, b, t=t: t[2, l, c],
        )
        for t in rng.random((n_stages, 3, 10, 10)) + 0.1
    ]


def draw(drawn, seed: int, **options) -> tuple[tp.Schedule, list[tp.CallableCost], Timeline]:
    orders, slicing = drawn
    schedule = tp.Schedule.from_orders(dict(enumerate(orders)), slicing)
    costs = random_costs(schedule.n_stages, seed)
    return schedule, costs, tp.simulate(schedule, costs, **options)


def draw_options(seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    link = tp.Link(rng.choice([0.0, 0.4]), rng.choice([1e-3, float("inf")]), rng.random() < 0.7)
    return {"link": link, "bytes_per_token": 100, "contention": rng.choice([1.0, 1.7])}


def disturb(frame: pd.DataFrame, seed: int) -> pd.DataFrame:
    """As if measured, three times: late starts, clocks that may contradict the order, rows that may be missing."""
    rng = np.random.default_rng(seed)
    steps = []
    for step in range(3):
        shift = rng.random(len(frame)) * rng.choice([0.0, 0.1, 3.0])
        kept = rng.random(len(frame)) >= rng.choice([0.0, 0.0, 0.3])
        moved = frame.assign(step=step, source="measured", start_ms=frame["start_ms"] + shift)
        moved = moved.assign(end_ms=moved["start_ms"] + (frame["end_ms"] - frame["start_ms"]) * rng.uniform(0.5, 1.5))
        steps.append(moved[kept | (np.arange(len(frame)) == step)])
    return pd.concat(steps, ignore_index=True)


def check_sum(timeline: Timeline, budget: pd.Series) -> None:
    assert budget.sum() == pytest.approx(timeline.n_ranks * timeline.makespan_ms, **EXACT)
    assert [name for name in BUDGET if name in budget] == budget.index.tolist()


class TestSum:
    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_a_simulation_adds_up_to_ranks_times_makespan_and_leaves_nothing_unexplained(self, drawn, seed):
        *_, timeline = draw(drawn, seed, **draw_options(seed))
        budget = timeline.budget()
        check_sum(timeline, budget)
        assert budget.index.tolist() == SPLIT + OTHERS
        assert budget["unexplained"] == pytest.approx(0, abs=1e-9)
        assert budget["runtime"] == 0

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_so_do_steps_with_gaps_contradictions_and_missing_rows_with_and_without_their_messages(self, drawn, seed):
        *_, timeline = draw(drawn, seed, **draw_options(seed))
        rows = disturb(timeline.frame, seed)
        for frame in (rows, rows.drop(columns=["ready_ms", "blocked_by", "slice_tokens"]), rows.iloc[[0]]):
            given_rows = Timeline.from_frame(frame)
            check_sum(given_rows, given_rows.budget())
            assert given_rows.budget(contention=1.3).index.tolist() == ["compute", "contention", *OTHERS]
            check_sum(given_rows, given_rows.budget(contention=1.3))

    def test_shares_are_means_over_measured_steps_times_the_median_makespan(self):
        rows = tp.simulate(tp.build_schedule("terapipe", 2, "[(1, [1, 1])]"), PER_TOKEN).frame
        steps = {-1: 50.0, 0: 1.0, 1: 2.0, 2: 8.0}
        frames = [
            rows.assign(step=step, start_ms=rows["start_ms"] * scale, end_ms=rows["end_ms"] * scale)
            for step, scale in steps.items()
        ]
        timeline = Timeline.from_frame(pd.concat(frames))
        check_sum(timeline, timeline.budget())
        assert timeline.makespan_ms == 18.0
        assert timeline.budget()["compute"] == pytest.approx(24.0)

    def test_a_rank_without_a_row_in_a_step_is_unexplained_there(self):
        both = tp.simulate(tp.build_schedule("terapipe", 2, "[(1, [1])]"), PER_TOKEN).frame
        timeline = Timeline.from_frame(pd.concat([both, both[both["rank"] == 0].assign(step=1)]))
        assert timeline.budget()["unexplained"] == pytest.approx(2 * 6 * (0 + 1 / 2) / 2)

    def test_an_instant_timeline_has_a_budget_of_nothing(self):
        nothing = tp.CallableCost(lambda l, c, b: 0.0, lambda l, c, b: 0.0)
        budget = tp.simulate(tp.build_schedule("terapipe", 2, "[(1, [1, 1])]"), nothing).budget()
        assert budget.tolist() == [0.0] * len(budget)


class TestParts:
    """Two slices on two ranks, forward 1 ms and backward 2 ms a token, unless said."""

    SCHEDULE = tp.build_schedule("terapipe", 2, "[(1, [1, 1])]")

    def budget(self, **parts: float) -> dict[str, float]:
        """12 ms of compute; fill 1, drain 2, and rank 0 idle from 2 to 5 ms."""
        return dict.fromkeys(SPLIT + OTHERS, 0.0) | {"useful": 12, "fill": 1, "drain": 2, "dependency": 3} | parts

    def test_equal_slices_and_free_messages_leave_fill_drain_and_the_turn_of_the_pipeline(self):
        """rank 0: F 0-1 1-2, B 5-7 7-9; rank 1: F 1-2 2-3, B 3-5 5-7."""
        assert tp.simulate(self.SCHEDULE, PER_TOKEN).budget().to_dict() == pytest.approx(self.budget())

    @pytest.mark.parametrize("n_ranks", [1, 2, 4])
    @pytest.mark.parametrize("k", [1, 3])
    def test_on_p_ranks_fill_is_f_drain_b_and_dependency_both_times_p_p_minus_1_over_2(self, n_ranks, k):
        """terapipe: rank r starts r forwards late, ends r backwards early, and waits P−1−r of both in between."""
        timeline = tp.simulate(tp.build_schedule("terapipe", n_ranks, tp.uniform_slicing(3 * k, k, 2)), PER_TOKEN)
        ranks = n_ranks * (n_ranks - 1) / 2
        expected = self.budget(useful=n_ranks * 2 * k * 9, fill=3 * ranks, drain=6 * ranks, dependency=9 * ranks)
        assert timeline.budget().to_dict() == pytest.approx(expected)

    def test_a_latency_of_half_a_ms_costs_both_ranks_the_two_messages_on_the_path(self):
        """rank 0: F 0-1 1-2, B 6-8 8-10; rank 1: F 1.5-2.5 2.5-3.5, B 3.5-5.5 5.5-7.5: 10 ms in place of 9."""
        timeline = tp.simulate(self.SCHEDULE, PER_TOKEN, tp.Link(latency_ms=0.5))
        assert timeline.budget().to_dict() == pytest.approx(self.budget(communication=2))

    def test_blocking_sends_are_communication_too(self):
        """rank 0: F 0-1 1.5-2.5, B 6.5-8.5 9-11; rank 1: F 1.5-2.5 3-4, B 4-6 6.5-8.5: 11 ms in place of 9."""
        timeline = tp.simulate(self.SCHEDULE, PER_TOKEN, tp.Link(latency_ms=0.5, overlap=False))
        assert timeline.makespan_ms == 11
        assert timeline.budget().to_dict() == pytest.approx(self.budget(communication=4))

    def test_contention_of_2_doubles_the_slots_in_which_both_ranks_compute(self):
        """F 0-1, both F 1-3, F 3-4, B 4-6, both B 6-10, B 10-12: 12 ms in place of 9."""
        timeline = tp.simulate(self.SCHEDULE, PER_TOKEN, contention=2.0)
        assert timeline.makespan_ms == 12
        assert timeline.budget().to_dict() == pytest.approx(self.budget(contention=6))

    def test_a_slice_as_long_as_the_whole_doubles_everything(self):
        """Whole: F 0-1, F 1-2, B 2-4, B 4-6 on two ranks; shared out, each slice takes half as long: 4.5 ms in place of 9."""
        timeline = tp.simulate(self.SCHEDULE, PER_SLICE)
        assert timeline.makespan_ms == 9
        expected = self.budget(useful=6, fill=0.5, drain=1, dependency=1.5, slicing_overhead=9)
        assert timeline.budget().to_dict() == pytest.approx(expected)

    def test_a_stage_three_times_as_slow_is_dependency(self):
        """rank 0 takes 1 and 2 ms, rank 1 takes 3 and 6: 1 + 18 + 2 = 21 ms; if both took 2 and 4, 18: 6 fewer on two ranks."""
        slow = tp.CallableCost(lambda l, c, b: 3 * l, lambda l, c, b: 6 * l)
        timeline = tp.simulate(self.SCHEDULE, [PER_TOKEN, slow])
        assert timeline.makespan_ms == 21
        assert timeline.budget().to_dict() == pytest.approx(self.budget(useful=24, fill=2, drain=4, dependency=6 + 6))

    def test_measured_time_between_input_and_start_is_runtime(self):
        """rank 0: F 0-2, B 4.5-6.5, whose input ended at 4 and was there at 4.3; rank 1: F 2-3, B 3-4."""
        rows = pd.DataFrame(
            [(0, "F", 0.0, 2.0, 0.0), (0, "B", 4.5, 6.5, 4.3), (1, "F", 2.0, 3.0, 2.0), (1, "B", 3.0, 4.0, 3.0)],
            columns=["rank", "kind", "start_ms", "end_ms", "ready_ms"],
        )
        timeline = Timeline.from_frame(rows.assign(source="measured", microbatch=0, slice=0))
        even = {"compute": 6, "fill": 1.5, "drain": 1.5, "dependency": 3}  # F and B 1.5 ms each
        expected = dict.fromkeys(OTHERS, 0.0) | even | {"communication": 0.6, "runtime": 0.4}
        assert timeline.budget().to_dict() == pytest.approx(expected)

    def test_an_input_that_lay_waiting_took_no_longer_than_those_that_were_waited_for(self):
        """rank 1 is busy from 1.25 to 5.25 ms, and looks at the message of 0F0.1 (ended at 2) only at 5.25.

        0F0.0's took 0.25 ms while rank 1 waited for it. Without gaps and messages: F 1-5, F 5-6.
        """
        rows = pd.DataFrame(
            [(0, 0, 0.0, 1.0, 0.0), (0, 1, 1.0, 2.0, 0.0), (1, 0, 1.25, 5.25, 1.25), (1, 1, 5.5, 6.5, 5.4)],
            columns=["rank", "slice", "start_ms", "end_ms", "ready_ms"],
        )
        timeline = Timeline.from_frame(rows.assign(source="measured", microbatch=0, kind="F"))
        budget = timeline.budget()
        assert budget["communication"] == pytest.approx(2 * 0.25)
        assert budget["runtime"] == pytest.approx(2 * 0.25)

    def test_a_start_before_its_input_is_unexplained(self):
        rows = pd.DataFrame(
            [(0, 0.0, 2.0), (1, 1.0, 3.0)],
            columns=["rank", "start_ms", "end_ms"],
        )
        timeline = Timeline.from_frame(rows.assign(microbatch=0, slice=0, kind="F"))
        check_sum(timeline, timeline.budget())
        assert timeline.budget()["unexplained"] == pytest.approx(2 * (3 - 4))


class TestCounterfactuals:
    """Each part against a replay by the tests' own reference, or by a simulation without the cause."""

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_communication_is_ranks_times_what_the_reference_saves_without_messages(self, drawn, seed):
        schedule, _, timeline = draw(drawn, seed, **draw_options(seed) | {"contention": 1.0})
        durations = {f"{r.stage}{r.kind}{r.microbatch}.{r.slice}": r.end_ms - r.start_ms for r in timeline.frame.itertuples()}
        orders = [[str(action) for action in order] for order in schedule.orders]
        free = times(orders, lambda stage, kind, m, s: durations[f"{stage}{kind}{m}.{s}"])
        saved = timeline.makespan_ms - max(end for _, end in free.values())
        assert timeline.budget()["communication"] == pytest.approx(schedule.n_ranks * saved, **EXACT)
        assert timeline.budget()["contention"] == pytest.approx(0, abs=1e-9)

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_contention_and_slicing_overhead_are_what_a_simulation_saves_without_them(self, drawn, seed):
        schedule, costs, _ = draw(drawn, seed)
        orders = [[str(action) for action in order] for order in schedule.orders]
        function = {"F": "forward_ms", "B": "backward_ms", "I": "input_ms", "W": "weight_ms"}
        slices = schedule.slicing.microbatches

        def duration(stage: int, kind: str, microbatch: int, place: int) -> float:
            each = slices[microbatch]
            cost = getattr(costs[stage], function[kind])
            return float(cost(each.slice_tokens[place], each.context_tokens[place], each.n_sequences))

        def uncut(stage: int, kind: str, microbatch: int, place: int) -> float:
            cost = getattr(costs[stage], function[kind])
            total = sum(duration(stage, kind, microbatch, other) for other in range(slices[microbatch].n_slices))
            whole = float(cost(schedule.slicing.seq_tokens, 0, slices[microbatch].n_sequences))
            return duration(stage, kind, microbatch, place) * whole / total

        slowed = contended_times(orders, duration, 1.7)
        makespans = [max(end for _, end in found.values()) for found in (slowed, times(orders, duration), times(orders, uncut))]
        budget = tp.simulate(schedule, costs, contention=1.7).budget()
        assert budget["contention"] == pytest.approx(schedule.n_ranks * (makespans[0] - makespans[1]), **EXACT)
        assert budget["slicing_overhead"] == pytest.approx(schedule.n_ranks * (makespans[1] - makespans[2]), **EXACT)
        busy = sum(uncut(*split(text)) for order in orders for text in order)
        assert budget["useful"] == pytest.approx(busy, **EXACT)

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_losing_gaps_messages_or_contention_never_lengthens_and_fill_and_drain_are_times(self, drawn, seed):
        *_, timeline = draw(drawn, seed, **draw_options(seed))
        late = Timeline.from_frame(disturb(timeline.frame, seed))
        for each in (timeline, late):
            budget = each.budget(contention=1.7)
            assert (budget[["runtime", "communication", "contention", "fill", "drain"]] > -1e-9).all()

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_absent_causes_have_no_part(self, drawn, seed):
        """Costs by the token: no overhead of slices; whole microbatches, one stage a rank: no imbalance of slices."""
        orders, slicing = drawn
        schedule = tp.Schedule.from_orders(dict(enumerate(orders)), slicing)
        budget = tp.simulate(schedule, tp.CallableCost(lambda l, c, b: b * l, lambda l, c, b: 2 * b * l)).budget()
        for name in ("slicing_overhead", "contention", "communication", "runtime", "unexplained"):
            assert budget[name] == pytest.approx(0, abs=1e-9)
        if schedule.n_ranks == 1:
            assert budget[["dependency", "fill", "drain"]].abs().max() < 1e-9

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_sends_that_block_are_no_runtime_of_a_replayed_simulation(self, drawn, seed):
        *_, timeline = draw(drawn, seed, bytes_per_token=9)
        again = tp.replay(timeline, link=tp.Link(0.4, 1e-3, overlap=False))
        for each in (again, tp.replay(again)):
            assert each.budget()["runtime"] == 0
            assert each.budget()["unexplained"] == pytest.approx(0, abs=1e-9)


class TestWhatIsKnown:
    TIMELINE = tp.simulate(tp.build_schedule("seq1f1b", 3, tp.uniform_slicing(12, 3, 2)), PER_SLICE, contention=1.4)
    MEASURED = Timeline.from_frame(TIMELINE.frame.assign(source="measured"))

    def test_compute_stands_in_place_of_what_is_not_split_off(self):
        found = [
            self.MEASURED.budget(**known).index.tolist()
            for known in ({}, {"contention": 1.4}, {"cost": PER_SLICE}, {"cost": PER_SLICE, "contention": 1.4})
        ]
        parts = [["compute"], ["compute", "contention"], ["compute", "slicing_overhead"], SPLIT]
        assert found == [each + OTHERS for each in parts]

    @given(schedules(), st.integers(0, 2**32), st.sampled_from([1.0, 1.3, 2.5]))
    @PROPERTY
    def test_told_contention_and_cost_a_table_of_times_gives_the_budget_that_the_simulation_knows(self, drawn, seed, c):
        """Times alone, integrated over who ran beside whom, are those the simulation was given."""
        _, costs, timeline = draw(drawn, seed, contention=c, link=tp.Link(0.3))
        told = Timeline.from_frame(timeline.frame).budget(costs, c)
        assert told.to_dict() == pytest.approx(timeline.budget().to_dict(), **EXACT)

    def test_a_simulation_whose_cost_does_not_reach_to_the_whole_keeps_compute_in_one_part(self):
        points = [(l, c, 1, 1.0, 2.0) for l in (1, 2) for c in (0, 2)]
        table = tp.TableCost(pd.DataFrame(points, columns=POINT))
        timeline = tp.simulate(tp.build_schedule("terapipe", 2, "[(1, [2, 2])]"), table, contention=1.5)
        assert timeline.budget().index.tolist() == ["compute", "contention", *OTHERS]
        with pytest.raises(CostError, match="4"):
            Timeline.from_frame(timeline.frame).budget(table)

    def test_a_whole_beyond_what_was_measured_is_not_extrapolated_to(self):
        points = [(l, c, 1, 1.0, 2.0) for l in (1, 2) for c in (0, 2)]
        frame = pd.DataFrame(points, columns=POINT)
        timeline = tp.simulate(tp.build_schedule("terapipe", 2, "[(1, [2, 2])]"), tp.TableCost(frame, extrapolate=True))
        assert timeline.source == "simulated"
        assert "slicing_overhead" not in timeline.budget()
        with pytest.raises(CostError, match="whole microbatch of 4 tokens lies beyond"):
            Timeline.from_frame(timeline.frame).budget(tp.TableCost(frame, extrapolate=True))

    @pytest.mark.parametrize(
        ("change", "known", "error", "message"),
        [
            ({}, {"contention": 0.9}, CostError, "contention=0.9: needs a finite number ≥ 1"),
            ({}, {"cost": [PER_SLICE] * 2}, CostError, "2 cost models for stages 0…2"),
            ({"slice_tokens": np.nan}, {"cost": PER_SLICE}, TimelineError, "does not know how long its slices are"),
            (
                {},
                {"cost": tp.CallableCost(lambda l, c, b: np.where(l > 4, np.inf, 1.0), lambda l, c, b: 1.0)},
                CostError,
                "whole microbatch of 12 tokens has an infinite cost",
            ),
        ],
    )
    def test_what_cannot_be_split_is_refused(self, change, known, error, message):
        with pytest.raises(error, match=message):
            Timeline.from_frame(self.TIMELINE.frame.assign(**change)).budget(**known)

    @pytest.mark.parametrize("contention", [0.2, "2"])
    def test_a_contention_that_is_none_is_refused_of_a_simulation_too(self, contention):
        with pytest.raises(CostError, match=f"contention={contention!r}: needs a finite number ≥ 1"):
            self.TIMELINE.budget(contention=contention)

    def test_missing_slices_are_named_where_a_cost_should_share_out_the_whole(self):
        frame = self.MEASURED.frame
        rows = frame[~((frame["microbatch"] == 1) & (frame["slice"] == 2))]
        with pytest.raises(TimelineError, match="slices of microbatch 1 in step 0 do not add up to its 12 tokens"):
            Timeline.from_frame(rows).budget(PER_SLICE)


class TestCriticalPath:
    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_durations_and_gaps_add_up_to_the_makespan_and_each_is_blocked_by_the_one_before(self, drawn, seed):
        *_, timeline = draw(drawn, seed, **draw_options(seed))
        path = timeline.critical_path()
        texts = path["stage"].astype(str) + path["kind"] + path["microbatch"].astype(str) + "." + path["slice"].astype(str)
        assert path["blocked_by"].tolist() == ["", *texts[:-1]]
        key = ["stage", "kind", "microbatch", "slice"]
        known = timeline.frame.set_index(key)["blocked_by"]
        assert known.loc[pd.MultiIndex.from_frame(path[key])].tolist() == path["blocked_by"].tolist()
        length = path["gap_ms"].sum() + (path["end_ms"] - path["start_ms"]).sum()
        assert length == pytest.approx(timeline.makespan_ms, **EXACT)
        crosses = path["rank"] != path["rank"].shift(fill_value=path["rank"][0])
        assert (crosses == (path["reason"] == "message")).all()
        assert set(path["reason"][1:]) <= {"order", "input", "message"}

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_so_on_any_table_also_where_times_contradict_it(self, drawn, seed):
        *_, timeline = draw(drawn, seed, **draw_options(seed))
        late = Timeline.from_frame(disturb(timeline.frame, seed))
        for step in range(3):
            path = late.critical_path(step)
            length = path["gap_ms"].sum() + (path["end_ms"] - path["start_ms"]).sum()
            assert length == pytest.approx(late.steps["makespan_ms"][step], **EXACT)

    def test_two_slices_on_two_ranks_with_a_latency(self):
        timeline = tp.simulate(TestParts.SCHEDULE, PER_TOKEN, tp.Link(latency_ms=0.5))
        path = timeline.critical_path()
        assert path["blocked_by"].tolist() == ["", "0F0.0", "1F0.0", "1F0.1", "1B0.1", "0B0.1"]
        assert path["gap_ms"].tolist() == pytest.approx([0, 0.5, 0, 0, 0.5, 0])
        assert path["reason"].tolist() == ["", "message", "input", "input", "message", "input"]

    def test_it_is_the_median_steps_unless_another_is_asked_for(self):
        rows = tp.simulate(TestParts.SCHEDULE, PER_TOKEN).frame
        scales = enumerate((5, 1, 2, 3))
        frames = [rows.assign(step=s, start_ms=rows["start_ms"] * x, end_ms=rows["end_ms"] * x) for s, x in scales]
        timeline = Timeline.from_frame(pd.concat(frames))
        assert set(timeline.critical_path()["step"]) == {2}
        assert set(timeline.critical_path(0)["step"]) == {0}
        with pytest.raises(TimelineError, match=r"no step 7 in this timeline; available: 0, 1, 2, 3"):
            timeline.critical_path(7)


@pytest.mark.timeout(180)
def test_real_and_emulated_runs_leave_at_most_5_percent_unexplained_and_replay_within_1_percent(tmp_path):
    """Two ranks: tiny slices; slices of several ms; and 5 ms of sleep, over a link of 1 ms."""
    model = tp.ModelConfig(n_layers=4, d_model=256, n_heads=4, max_seq_tokens=512)
    runs = [
        tp.run(spec(tmp_path / "tiny", n_steps=3)),
        tp.run(spec(tmp_path / "medium", model=model, slicing="[(1, [256, 256])] * 2", schedule="seq1f1b", n_steps=3)),
        tp.run(spec(tmp_path / "emulated", device="emulated", cost=sleeps(5, 10), n_steps=3)),
    ]
    for run in runs:
        timeline = run.timeline
        budget = timeline.budget()
        total = timeline.n_ranks * timeline.makespan_ms
        check_sum(timeline, budget)
        assert abs(budget["unexplained"]) <= 0.05 * total
        assert tp.replay(timeline).makespan_ms == pytest.approx(timeline.makespan_ms, rel=1e-6)
        assert (timeline.frame["blocked_by"] == "").sum() == timeline.frame["step"].nunique()
        path = timeline.critical_path()
        assert path["gap_ms"].sum() + (path["end_ms"] - path["start_ms"]).sum() == pytest.approx(timeline.makespan_ms)
    emulated = runs[-1].timeline.budget(sleeps(5, 10), contention=1.0)
    assert emulated["contention"] == pytest.approx(0, abs=1e-9)
    assert emulated["slicing_overhead"] > 0, f"{SLICED}: every slice sleeps as long as the whole"
