"""The simulator against closed forms, against the order-level reference, and against known values."""

import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import contended_times, times
from strategies import PROPERTY, schedules

import terapipe as tp
from terapipe.errors import CostError, ScheduleError
from terapipe.timeline import COLUMNS

EXACT = {"rel": 1e-9, "abs": 1e-9}
WHOLE = tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: 2.0)  # t_B = 2 t_F for every slice


def per_token(f: float, b: float, seq_tokens: int) -> tp.CallableCost:
    """A microbatch takes f and b however it is cut."""
    return tp.CallableCost(lambda l, c, n: f * l / seq_tokens, lambda l, c, n: b * l / seq_tokens)


def as_times(timeline: tp.Timeline) -> dict[str, tuple[float, float]]:
    rows = timeline.frame
    texts = rows["stage"].astype(str) + rows["kind"] + rows["microbatch"].astype(str) + "." + rows["slice"].astype(str)
    return dict(zip(texts, zip(rows["start_ms"], rows["end_ms"], strict=True), strict=True))


def assert_same(simulated: tp.Timeline, expected: dict[str, tuple[float, float]]) -> None:
    found = as_times(simulated)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([found[text] for text in expected], list(expected.values()), rtol=1e-9, atol=1e-9)


def random_costs(n_stages: int, seed: int) -> tuple[list[tp.CallableCost], dict[str, np.ndarray]]:
    """A cost a stage, different for every (slice, context); zeros, ties and weights included."""
    rng = np.random.default_rng(seed)
    tables = {kind: rng.choice([0.0, 1.0, 1.0, 2.5, *rng.random(6)], size=(n_stages, 10, 10)) for kind in "FIW"}
    tables["B"] = tables["I"] + tables["W"]

    def cost(stage: int) -> tp.CallableCost:
        return tp.CallableCost(*(lambda l, c, b, table=tables[kind][stage]: b * table[l, c] for kind in "FBW"))

    return [cost(stage) for stage in range(n_stages)], tables


def draw_case(drawn, seed):
    """A schedule with random costs on unequal stages, and the same durations for the reference."""
    orders, slicing = drawn
    schedule = tp.Schedule.from_orders(dict(enumerate(orders)), slicing)
    costs, tables = random_costs(schedule.n_stages, seed)

    def duration(stage, kind, microbatch, place):
        each = slicing.microbatches[microbatch]
        return each.n_sequences * tables[kind][stage, each.slice_tokens[place], sum(each.slice_tokens[:place])]

    return orders, slicing, schedule, costs, duration


class TestClosedForms:
    RANKS, MICROBATCHES, SLICES = (1, 2, 3, 4, 8), (1, 2, 3, 8, 16), (1, 2, 3, 4, 7)

    @pytest.mark.parametrize("name", ["gpipe", "1f1b"])
    @pytest.mark.parametrize("n_ranks", RANKS)
    def test_gpipe_and_1f1b_take_m_plus_p_minus_1_microbatches(self, name, n_ranks):
        for m in self.MICROBATCHES:
            for t_f, t_b in ((1.0, 2.0), (0.7, 0.7), (3.1, 1.3)):
                cost = tp.CallableCost(lambda l, c, b, t=t_f: t, lambda l, c, b, t=t_b: t)
                timeline = tp.simulate(tp.build_schedule(name, n_ranks, tp.uniform_slicing(8, 1, m)), cost)
                assert timeline.makespan_ms == pytest.approx((m + n_ranks - 1) * (t_f + t_b), **EXACT)

    @pytest.mark.parametrize("n_ranks", RANKS)
    @pytest.mark.parametrize("k", SLICES)
    def test_terapipe_in_k_equal_slices_takes_m_plus_p_minus_1_over_k_microbatches(self, n_ranks, k):
        for m in self.MICROBATCHES:
            timeline = tp.simulate(
                tp.build_schedule("terapipe", n_ranks, tp.uniform_slicing(84, k, m)), per_token(1.5, 2.0, 84)
            )
            assert timeline.makespan_ms == pytest.approx((m + (n_ranks - 1) / k) * 3.5, **EXACT)

    @pytest.mark.parametrize("n_ranks", RANKS)
    @pytest.mark.parametrize("seed", range(8))
    def test_terapipe_on_identical_stages_takes_the_two_phase_latency_for_unequal_slices(self, n_ranks, seed):
        """Σ(f + b) + (P−1)(max f + max b), the slowest forward and the slowest backward in different slices."""
        rng = random.Random(seed)
        f, b = ([rng.choice([0.0, 1.0, rng.random() * 5]) for _ in range(100)] for _ in range(2))
        cost = tp.CallableCost(
            lambda l, c, n: np.asarray(f)[np.asarray(l) * 7 % 100 + np.asarray(c) % 3] * n,
            lambda l, c, n: np.asarray(b)[np.asarray(c) * 5 % 100] * n,
        )
        slicing = tp.Slicing.parse("[(1, [5, 3, 2]), (2, [10]), (1, [1, 8, 1]), (1, [2] * 5)]")
        _, _, lengths, contexts, sequences = slicing.units.T
        forward, backward = cost.forward_ms(lengths, contexts, sequences), cost.backward_ms(lengths, contexts, sequences)
        expected = sum(forward) + sum(backward) + (n_ranks - 1) * (max(forward) + max(backward))
        timeline = tp.simulate(tp.build_schedule("terapipe", n_ranks, slicing), cost)
        assert timeline.makespan_ms == pytest.approx(expected, **EXACT)
        assert tp.pipeline_latency_ms(slicing, cost, n_ranks) == pytest.approx(expected, **EXACT)

    def test_the_papers_eq_5_is_not_the_step_time_where_the_slowest_slices_differ(self):
        cost = tp.CallableCost(lambda l, c, b: np.where(c == 0, 1.0, 3.0), lambda l, c, b: np.where(c == 0, 4.0, 1.0))
        slicing = tp.Slicing.parse("[(1, [2, 2])]")
        step = tp.simulate(tp.build_schedule("terapipe", 3, slicing), cost).makespan_ms
        assert step == tp.pipeline_latency_ms(slicing, cost, 3, "two-phase") == 23
        assert tp.pipeline_latency_ms(slicing, cost, 3, "paper") == 19

    @pytest.mark.parametrize("n_stages", [2, 8])
    def test_the_plan_of_the_slicing_dp_takes_in_simulation_what_it_promises(self, n_stages):
        cost = tp.CallableCost(
            lambda l, c, b: 4 + l + 0.02 * l * (c + l / 2), lambda l, c, b: 9 + 2 * l + 0.05 * l * (c + l / 2)
        )
        plan = tp.optimal_slicing(cost, 96, n_stages)
        simulated = tp.simulate(tp.build_schedule("terapipe", n_stages, plan.slicing), cost).makespan_ms
        assert simulated == pytest.approx(plan.latency_ms, **EXACT)
        for k in range(1, 33):
            assert (
                simulated
                <= tp.simulate(tp.build_schedule("terapipe", n_stages, tp.uniform_slicing(96, k)), cost).makespan_ms + 1e-9
            )

    @pytest.mark.parametrize("n_ranks", RANKS)
    def test_peaks_are_m_k_units_for_gpipe_and_terapipe_and_p_minus_r_for_1f1b(self, n_ranks):
        ranks = np.arange(n_ranks)
        for m in self.MICROBATCHES:
            whole = tp.uniform_slicing(8, 1, m)
            gpipe = tp.simulate(tp.build_schedule("gpipe", n_ranks, whole), WHOLE).peak_in_flight()
            one_f_one_b = tp.simulate(tp.build_schedule("1f1b", n_ranks, whole), WHOLE).peak_in_flight()
            sliced = tp.simulate(tp.build_schedule("terapipe", n_ranks, tp.uniform_slicing(8, 3, m)), WHOLE).peak_in_flight()
            assert gpipe.index.tolist() == ranks.tolist()
            assert gpipe.tolist() == [m] * n_ranks
            assert sliced.tolist() == [3 * m] * n_ranks
            assert one_f_one_b.tolist() == np.minimum(n_ranks - ranks, m).tolist()

    def test_96_ranks_and_512_units_equal_the_closed_form(self):
        schedule = tp.build_schedule("terapipe", 96, tp.uniform_slicing(64, 64, 8))
        timeline = tp.simulate(schedule, WHOLE)
        assert len(timeline.frame) == 2 * 96 * 512
        assert timeline.makespan_ms == pytest.approx((512 + 95) * 3.0, **EXACT)
        assert timeline.bubble_fraction == pytest.approx(95 / (512 + 95), **EXACT)


class TestReference:
    """On any legal schedule: random placements, unequal stages, B or I and W."""

    @given(schedules(), st.integers(0, 2**32))
    @settings(PROPERTY, max_examples=100)
    def test_random_schedules_on_unequal_stages_equal_the_reference(self, drawn, seed):
        orders, _, schedule, costs, duration = draw_case(drawn, seed)
        assert_same(tp.simulate(schedule, costs), times(orders, duration))

    @given(schedules(), st.integers(0, 2**32), st.booleans(), st.booleans())
    @settings(PROPERTY, max_examples=100)
    def test_with_latency_bandwidth_and_blocking_sends_too(self, drawn, seed, overlap, one_link):
        orders, slicing, schedule, costs, duration = draw_case(drawn, seed)
        rng = random.Random(seed)
        same = (rng.choice([0.0, 0.3]), rng.choice([1e-3, 5e-3, float("inf")]))
        pairs = [(a, b) for a in range(len(orders)) for b in range(len(orders)) if a != b]
        values = {
            pair: same if one_link else (rng.choice([0.0, 0.1, 1.0]), rng.choice([2e-3, 1e-2, float("inf")])) for pair in pairs
        }
        links = {pair: tp.Link(*value, overlap=overlap) for pair, value in values.items()}
        link = tp.Link(*same, overlap=overlap) if one_link else links

        def transmission(source, target, text):
            microbatch, place = (
                int(number) for number in text[next(i for i, c in enumerate(text) if c in "FBIW") + 1 :].split(".")
            )
            each = slicing.microbatches[microbatch]
            return 1000 * each.slice_tokens[place] * each.n_sequences / (values[source, target][1] * 1e6)

        expected = times(orders, duration, lambda source, target: values[source, target][0], transmission, blocking=not overlap)
        assert_same(tp.simulate(schedule, costs, link, bytes_per_token=1000), expected)

    @given(schedules(), st.integers(0, 2**32), st.sampled_from([1.0, 1.25, 1.9, 3.0]), st.sampled_from([0.0, 0.37]))
    @settings(PROPERTY, max_examples=100)
    def test_with_contention_too(self, drawn, seed, contention, latency):
        orders, _, schedule, costs, duration = draw_case(drawn, seed)
        link = tp.Link(latency)
        timeline = tp.simulate(schedule, costs, link, contention=contention)
        assert_same(timeline, contended_times(orders, duration, contention, latency))
        alone = tp.simulate(schedule, costs, link).makespan_ms
        assert alone - 1e-9 <= timeline.makespan_ms <= contention * alone + 1e-9

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_ready_is_the_last_inputs_end_and_blocked_by_ends_at_the_start(self, drawn, seed):
        _, _, schedule, costs, _ = draw_case(drawn, seed)
        timeline = tp.simulate(schedule, costs)
        ends = {text: end for text, (_, end) in as_times(timeline).items()}
        for row in timeline.frame.itertuples():
            assert row.ready_ms <= row.start_ms
            if row.blocked_by:
                assert ends[row.blocked_by] == pytest.approx(row.start_ms, **EXACT)
            else:
                assert row.start_ms == 0

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_the_same_question_has_the_same_answer(self, drawn, seed):
        _, _, schedule, costs, _ = draw_case(drawn, seed)
        link = tp.Link(0.1, 1e-3)
        first, again = (tp.simulate(schedule, costs, link, 100, 1.3).frame for _ in range(2))
        pd.testing.assert_frame_equal(first, again, check_exact=True)


class TestLinks:
    def test_1f1b_pays_link_latency_that_gpipe_hides(self):
        """P=4, M=8, t_B = 2 t_F: both 33 t_F; with a latency of 0.3 t_F 34.8 and 37.8 (order-level simulation)."""
        whole = tp.uniform_slicing(8, 1, 8)
        for name, with_latency in (("gpipe", 34.8), ("1f1b", 37.8)):
            schedule = tp.build_schedule(name, 4, whole)
            assert tp.simulate(schedule, WHOLE).makespan_ms == pytest.approx(33.0, **EXACT)
            assert tp.simulate(schedule, WHOLE, tp.Link(latency_ms=0.3)).makespan_ms == pytest.approx(with_latency, **EXACT)

    def test_latency_does_not_occupy_the_link_but_transmission_does(self):
        """Three slices that take 1 over a link of 3: forward 1 + 3 + 3 with latency, 1 + 3·3 + 1 with bandwidth."""
        schedule = tp.Schedule.from_orders({0: "0F0 0F0.1 0F0.2", 1: "1F0 1F0.1 1F0.2"}, "[(1, [1, 1, 1])]")
        latency = tp.simulate(schedule, WHOLE, tp.Link(latency_ms=3.0), bytes_per_token=100).frame
        bandwidth = tp.simulate(schedule, WHOLE, tp.Link(bandwidth_gb_s=1e-4), bytes_per_token=300).frame
        assert latency[latency["rank"] == 1]["start_ms"].tolist() == pytest.approx([4.0, 5.0, 6.0])
        assert bandwidth[bandwidth["rank"] == 1]["start_ms"].tolist() == pytest.approx([4.0, 7.0, 10.0])
        assert bandwidth[bandwidth["rank"] == 0]["start_ms"].tolist() == pytest.approx([0.0, 1.0, 2.0])  # sends beside compute

    def test_messages_the_two_ways_do_not_wait_for_each_other(self):
        schedule = tp.Schedule.from_orders({0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1"}, "[(1, [1])] * 2")
        frame = tp.simulate(
            schedule, tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: 1.0), tp.Link(bandwidth_gb_s=1e-6), 3
        ).frame
        starts = dict(
            zip(frame["stage"].astype(str) + frame["kind"] + frame["microbatch"].astype(str), frame["start_ms"], strict=True)
        )
        assert starts == pytest.approx({"0F0": 0, "0F1": 1, "1F0": 4, "1B0": 5, "1F1": 7, "1B1": 8, "0B0": 9, "0B1": 12})

    @pytest.mark.parametrize("n_ranks", [1, 2, 3, 6])
    @pytest.mark.parametrize("k", [1, 2, 5])
    def test_without_overlap_every_slice_pays_the_papers_2_p2p(self, n_ranks, k):
        """Eq. (5) with t = f + b + 2·p2p; the last rank sends no forward and the first no backward, hence − 2·p2p."""
        x = 0.25
        schedule = tp.build_schedule("terapipe", n_ranks, tp.uniform_slicing(10, k))
        step = tp.simulate(schedule, WHOLE, tp.Link(latency_ms=x, overlap=False)).makespan_ms
        expected = (k + n_ranks - 1) * (3 + 2 * x) - 2 * x if n_ranks > 1 else 3 * k
        assert step == pytest.approx(expected, **EXACT)
        bandwidth = tp.Link(bandwidth_gb_s=1e-6 / x, overlap=False)
        unit = tp.CallableCost(lambda l, c, b: l / 2, lambda l, c, b: l)
        even = tp.build_schedule("terapipe", n_ranks, tp.uniform_slicing(2 * k, k))
        assert tp.simulate(even, unit, bandwidth, bytes_per_token=0.5).makespan_ms == pytest.approx(expected, **EXACT)

    def test_a_blocking_send_keeps_its_rank_until_the_message_has_arrived(self):
        schedule = tp.Schedule.from_orders({0: "0F0 0F0.1", 1: "1F0 1F0.1"}, "[(1, [1, 1])]")
        frame = tp.simulate(schedule, WHOLE, tp.Link(latency_ms=2.0, overlap=False)).frame
        assert frame["start_ms"].tolist() == [0.0, 3.0, 3.0, 6.0]

    def test_each_pair_of_ranks_uses_its_own_link(self):
        schedule = tp.build_schedule("gpipe", 3, "[(1, [4])]")
        links = {(0, 1): tp.Link(1.0), (1, 2): tp.Link(10.0), (2, 1): tp.Link(100.0), (1, 0): tp.Link(1000.0)}
        assert tp.simulate(schedule, WHOLE, links).makespan_ms == pytest.approx(9 + 1111)

    def test_a_missing_pair_is_refused_by_name(self):
        schedule = tp.build_schedule("gpipe", 2, "[(1, [4])]")
        with pytest.raises(CostError, match=r"no link from rank 1 to rank 0; links are given for \[\(0, 1\)\]"):
            tp.simulate(schedule, WHOLE, {(0, 1): tp.Link()})

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"link": 5}, "link=5: needs a Link"),
            ({"link": {(0, 1): 3}}, r"link=\{\(0, 1\): 3\}: needs a Link"),
            ({"contention": "2"}, "contention='2': needs a finite number"),
            ({"contention": None}, "contention=None: needs a finite number"),
            ({"bytes_per_token": "x"}, "bytes_per_token='x': needs a finite number"),
        ],
    )
    def test_what_is_no_link_or_number_is_refused_with_its_value(self, given, message):
        with pytest.raises(CostError, match=message):
            tp.simulate(tp.build_schedule("terapipe", 2, "[(1, [1, 1])]"), WHOLE, **given)

    def test_stages_on_one_rank_hand_over_at_once_and_need_no_link(self):
        schedule = tp.Schedule.from_orders({0: "0F0 1F0 1B0 0B0"}, "[(1, [4])]")
        frame = tp.simulate(schedule, WHOLE, {}, bytes_per_token=8).frame
        assert frame["end_ms"].tolist() == [1.0, 2.0, 4.0, 6.0]
        assert (frame["n_bytes"] == 0).all()

    def test_bytes_are_tokens_times_sequences_of_every_output_that_leaves_its_rank(self):
        schedule = tp.build_schedule("terapipe", 2, "[(3, [2, 1])]")
        frame = tp.simulate(schedule, WHOLE, bytes_per_token=10).frame
        sent = {text: row for text, row in zip(as_times(tp.Timeline(frame)), frame["n_bytes"], strict=True) if row}
        assert sent == {"0F0.0": 60, "0F0.1": 30, "1B0.1": 30, "1B0.0": 60}

    def test_of_a_split_backward_only_the_input_half_sends(self):
        schedule = tp.Schedule.from_orders({0: "0F0 0I0 0W0", 1: "1F0 1I0 1W0"}, "[(1, [4])]")
        assert tp.simulate(schedule, WHOLE, bytes_per_token=1).frame["n_bytes"].tolist() == [4, 0, 0, 0, 4, 0]


class TestContention:
    @pytest.mark.parametrize("c", [1.0, 1.37, 2.0, 5.0])
    def test_two_ranks_that_always_both_compute_take_exactly_c_times_as_long(self, c):
        """Stage 0 works on the microbatch of one sequence while stage 1 works on that of two: neither ever waits."""
        one, two = (
            tp.CallableCost(lambda l, c, b, n=n: np.where(b == n, 1.0, 0.0), lambda l, c, b, n=n: np.where(b == n, 2.0, 0.0))
            for n in (1, 2)
        )
        schedule = tp.build_schedule("gpipe", 2, "[(2, [4]), (1, [4])]")
        alone = tp.simulate(schedule, [one, two])
        assert alone.bubble_fraction == pytest.approx(0.0, abs=1e-12)
        assert tp.simulate(schedule, [one, two], contention=c).makespan_ms == pytest.approx(c * alone.makespan_ms, **EXACT)

    @pytest.mark.parametrize("c", [1.0, 1.37, 2.0])
    def test_c_slows_only_the_time_in_which_both_compute(self, c):
        """Two slices of 1 on two ranks, forward only: rank 0 alone, both, rank 1 alone."""
        schedule = tp.Schedule.from_orders({0: "0F0 0F0.1", 1: "1F0 1F0.1"}, "[(1, [1, 1])]")
        frame = tp.simulate(schedule, WHOLE, contention=c).frame
        np.testing.assert_allclose(frame["start_ms"], [0, 1, 1, 1 + c])
        np.testing.assert_allclose(frame["end_ms"], [1, 1 + c, 1 + c, 2 + c])

    @pytest.mark.parametrize("c", [1.0, 1.3, 2.0])
    @pytest.mark.parametrize("k", [1, 2, 3, 8, 64])
    def test_k_equal_slices_on_2_ranks_are_2k_over_2_plus_k_minus_1_times_c_faster(self, k, c):
        """Each phase has k + 1 slots of which k − 1 overlap and take c times as long; one slice never overlaps."""
        cost = per_token(1 / 3, 2 / 3, 192)
        whole, sliced = (
            tp.simulate(tp.build_schedule("terapipe", 2, tp.uniform_slicing(192, n)), cost, contention=c).makespan_ms
            for n in (1, k)
        )
        assert whole == pytest.approx(2.0, **EXACT)
        assert sliced == pytest.approx((2 + (k - 1) * c) / k, **EXACT)
        assert whole / sliced == pytest.approx(2 * k / (2 + (k - 1) * c), **EXACT)

    def test_three_ranks_at_once_are_slowed_no_more_than_two(self):
        schedule = tp.build_schedule("terapipe", 3, tp.uniform_slicing(6, 6))
        alone = tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: 0.0)
        assert tp.simulate(schedule, alone, contention=2.0).makespan_ms == pytest.approx(2 * 1 + 6 * 2.0)

    def test_messages_are_not_slowed(self):
        schedule = tp.Schedule.from_orders({0: "0F0 0F0.1", 1: "1F0 1F0.1"}, "[(1, [1, 1])]")
        frame = tp.simulate(schedule, WHOLE, tp.Link(latency_ms=0.5), contention=2.0).frame
        # 0F0 0…1; 0F0.1 alone to 1.5, then with 1F0 at half speed to 2.5, when 1F0 has half its work left and no rival: 3.0
        np.testing.assert_allclose(frame["start_ms"], [0, 1, 1.5, 3.0])
        np.testing.assert_allclose(frame["end_ms"], [1, 2.5, 3.0, 4.0])

    @pytest.mark.parametrize("contention", [0.99, 0.0, -1.0, float("inf"), float("nan")])
    def test_a_contention_that_is_no_slowdown_is_refused(self, contention):
        with pytest.raises(CostError, match=f"contention={contention}"):
            tp.simulate(tp.build_schedule("gpipe", 2, "[(1, [4])]"), WHOLE, contention=contention)


class TestFrame:
    def test_the_table_has_a_row_an_action_in_rank_order_with_its_slice(self):
        frame = tp.simulate(tp.build_schedule("terapipe", 2, "[(3, [2, 1])]"), per_token(3.0, 6.0, 3), bytes_per_token=10).frame
        assert frame.columns.tolist() == COLUMNS
        assert set(frame["source"]) == {"simulated"}
        assert set(frame["step"]) == {0}
        assert frame[
            ["rank", "stage", "kind", "microbatch", "slice", "n_sequences", "slice_tokens", "context_tokens"]
        ].values.tolist() == [
            [0, 0, "F", 0, 0, 3, 2, 0],
            [0, 0, "F", 0, 1, 3, 1, 2],
            [0, 0, "B", 0, 1, 3, 1, 2],
            [0, 0, "B", 0, 0, 3, 2, 0],
            [1, 1, "F", 0, 0, 3, 2, 0],
            [1, 1, "F", 0, 1, 3, 1, 2],
            [1, 1, "B", 0, 1, 3, 1, 2],
            [1, 1, "B", 0, 0, 3, 2, 0],
        ]
        assert frame["blocked_by"].tolist() == ["", "0F0.0", "1B0.1", "1B0.0", "0F0.0", "1F0.0", "1F0.1", "1B0.1"]

    def test_split_backwards_cost_input_then_weight(self):
        cost = tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: 5.0, weight_ms=lambda l, c, b: 2.0)
        frame = tp.simulate(tp.Schedule.from_orders({0: "0F0 0I0 0W0"}, "[(1, [4])]"), cost).frame
        assert (frame["end_ms"] - frame["start_ms"]).tolist() == [1.0, 3.0, 2.0]

    def test_a_cost_a_stage_is_used_by_stage_not_by_rank(self):
        costs = [tp.CallableCost(lambda l, c, b, t=t: t, lambda l, c, b: 0.0) for t in (1.0, 10.0, 100.0)]
        frame = tp.simulate(tp.Schedule.from_orders({0: "0F0 2F0", 1: "1F0"}, "[(1, [4])]"), costs).frame
        assert (frame["end_ms"] - frame["start_ms"]).tolist() == [1.0, 100.0, 10.0]


class TestRefusals:
    SCHEDULE = tp.build_schedule("terapipe", 2, "[(1, [2, 2])]")

    def test_an_infinite_cost_is_refused_naming_the_first_such_action(self):
        cost = tp.CallableCost(lambda l, c, b: np.where(c > 0, np.inf, 1.0), lambda l, c, b: 1.0)
        with pytest.raises(CostError, match=r"^0F0\.1 has an infinite cost"):
            tp.simulate(self.SCHEDULE, cost)

    @pytest.mark.parametrize("value", [np.nan, -1.0])
    def test_nan_and_negative_costs_are_refused(self, value):
        with pytest.raises(CostError, match=f"{value} ms at slice_tokens=2"):
            tp.simulate(self.SCHEDULE, tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: value))

    def test_a_weight_part_beyond_the_backward_is_refused(self):
        cost = tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: 1.0, weight_ms=lambda l, c, b: 2.0)
        with pytest.raises(CostError, match=r"weight_ms of 2\.0 ms is more than backward_ms of 1\.0 ms"):
            tp.simulate(tp.Schedule.from_orders({0: "0F0 0I0 0W0"}, "[(1, [4])]"), cost)

    @pytest.mark.parametrize("n", [1, 3])
    def test_another_number_of_costs_than_stages_is_refused_with_both(self, n):
        with pytest.raises(CostError, match=f"{n} cost models for 2 stages"):
            tp.simulate(self.SCHEDULE, [WHOLE] * n)

    @pytest.mark.parametrize("bytes_per_token", [-1, float("nan"), float("inf")])
    def test_a_message_size_that_is_none_is_refused(self, bytes_per_token):
        with pytest.raises(CostError, match=f"bytes_per_token={bytes_per_token}"):
            tp.simulate(self.SCHEDULE, WHOLE, bytes_per_token=bytes_per_token)

    def test_what_is_no_schedule_or_no_valid_one_is_refused(self):
        with pytest.raises(ScheduleError, match="'terapipe' is not a schedule"):
            tp.simulate("terapipe", WHOLE)
        with pytest.raises(ScheduleError, match=r"0B0\.0 is missing"):
            tp.simulate(tp.Schedule.from_orders({0: "0F0", 1: "1F0 1B0"}, "[(1, [4])]"), WHOLE)
