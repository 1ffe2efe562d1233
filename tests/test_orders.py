"""Every schedule family against its closed forms, in the simulator and in the order-level reference.

P ranks, M microbatches, k slices each, v stages a rank, N = M·k; f, i, w: forward, input gradient and
weight gradient of one microbatch on one rank, b = i + w.
"""

import math
import re
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import split, times
from strategies import PROPERTY, slicings

import terapipe as tp
from terapipe.errors import ScheduleError
from terapipe.schedule import FAMILIES

EXACT = {"rel": 1e-9, "abs": 1e-9}
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.4, 0.6), (0.7, 0.25, 1.3)]
INTERLEAVED = ("interleaved", "seq1f1b-interleaved", "slimpipe")
TWO_STAGES = ("zbv", "v-half", "v-min", "dualpipev")
WHOLE = tuple(name for name, family in FAMILIES.items() if family.takes_slices == "whole")
OPTIONS = {"svpp": {"max_in_flight": 10**6}}


def group(P, k):
    """Units that pass through one stage of a rank before the next one's turn."""
    return k if k % P == 0 else P if P % k == 0 else P * k


def per_microbatch(k, v, f, i, w):
    """A microbatch takes f, i and w on a rank, spread evenly over its k slices and v stages."""
    return tp.CallableCost(*(lambda l, c, n, t=t: np.full(np.shape(l), t / k / v) for t in (f, i + w, w)))


def as_text(schedule):
    return [[str(action) for action in order] for order in schedule.orders]


def build(name, P, M, k, v):
    return tp.build_schedule(name, P, tp.uniform_slicing(12 * k, k, M), v, **OPTIONS.get(name, {}))


def refusal(name, P, slicing, chunks=None):
    """Why a family does not run a slicing; "" where its schedule is complete and does not deadlock."""
    try:
        schedule = tp.build_schedule(name, P, slicing, chunks, **OPTIONS.get(name, {}))
    except ScheduleError as error:
        return str(error)
    assert schedule.validate().n_ranks == P
    return ""


@cache
def sizes(name):
    """(P, M, k, v) that a family can run, from a grid that holds every formula's smallest case."""
    family = FAMILIES[name]
    found = []
    for P in (1, 2, 3, 4, 6):
        counts = sorted({1, 2, 3, P, 2 * P - 2, 2 * P - 1, 2 * P, 4 * P} - {0})
        slices = (1,) if family.takes_slices == "whole" else (1, 2, 3, 4, 6)
        for M, k, v in product(counts, slices, (1, 2, 3) if family.any_chunks else (family.chunks,)):
            if P * M * k * v <= (300 if slices == (1,) else 32):
                try:
                    build(name, P, M, k, v)
                except ScheduleError:
                    continue
                found.append((P, M, k, v))
    return found


def two_phase(P, M, k, v, f, i, w):
    return (P - 1) * (f + i + w) / k / v


BUBBLES = {  # name: idle time of a rank in a step, and when it is that
    "gpipe": (two_phase, lambda P, M, k, v, f, i, w: True),
    "terapipe": (two_phase, lambda P, M, k, v, f, i, w: True),
    "1f1b": (two_phase, lambda P, M, k, v, f, i, w: True),
    "seq1f1b": (two_phase, lambda P, M, k, v, f, i, w: True),
    "interleaved": (two_phase, lambda P, M, k, v, f, i, w: True),
    "seq1f1b-interleaved": (two_phase, lambda P, M, k, v, f, i, w: True),
    "slimpipe": (two_phase, lambda P, M, k, v, f, i, w: True),
    "looped-bfs": (two_phase, lambda P, M, k, v, f, i, w: M * k >= P),
    "forward-only": (lambda P, M, k, v, f, i, w: (P - 1) * f / k, lambda P, M, k, v, f, i, w: True),
    "zb-h1": (lambda P, M, k, v, f, i, w: (P - 1) * max(f, f + i - w), lambda P, M, k, v, f, i, w: P <= M),
    "zb-h2": (lambda P, M, k, v, f, i, w: (P - 1) * max(f, f + i - 2 * w), lambda P, M, k, v, f, i, w: 2 * P - 1 <= M),
    "seq1f1b-zb": (
        lambda P, M, k, v, f, i, w: (P - 1) * max(f, f + i - w) / k,
        lambda P, M, k, v, f, i, w: P + k - 1 <= M * k,
    ),
    "zbv": (lambda P, M, k, v, f, i, w: (P - 1) * f / 2, lambda P, M, k, v, f, i, w: f == i == w and 2 * P - 2 <= M),
    "v-half": (
        lambda P, M, k, v, f, i, w: (1.75 * P - 1 if P % 2 == 0 else 1.75 * (P - 1)) * f,
        lambda P, M, k, v, f, i, w: f == i == w and 4 * P == M,
    ),
    "v-min": (
        lambda P, M, k, v, f, i, w: (2 * P - 1.5 if P % 3 == 0 else 2 * P - 2.5) * f,
        lambda P, M, k, v, f, i, w: f == i == w and 4 * P == M and P > 1,
    ),
    "dualpipev": (lambda P, M, k, v, f, i, w: (P - 1) * f / 2, lambda P, M, k, v, f, i, w: f == i == w and 2 * P - 1 <= M),
}

PEAKS = {  # name: units on rank r, never more than those of a step
    "gpipe": lambda P, M, k, v, r: M,
    "terapipe": lambda P, M, k, v, r: M * k,
    "1f1b": lambda P, M, k, v, r: P - r,
    "seq1f1b": lambda P, M, k, v, r: P - r - 1 + k,
    "interleaved": lambda P, M, k, v, r: (v - 1) * P + 2 * (P - r - 1) + 1 if v > 1 else P - r,
    "seq1f1b-interleaved": lambda P, M, k, v, r: (v - 1) * group(P, k) + 2 * (P - r - 1) + k if v > 1 else P - r - 1 + k,
    "slimpipe": lambda P, M, k, v, r: k * v + 2 * (P - r - 1) if v > 1 else P - r - 1 + k,
    "looped-bfs": lambda P, M, k, v, r: M * k * v,
    "zb-h1": lambda P, M, k, v, r: P,
    "zb-h2": lambda P, M, k, v, r: 2 * P - 1,
    "seq1f1b-zb": lambda P, M, k, v, r: P + k - 1,
    "forward-only": lambda P, M, k, v, r: 1,
}
V_PEAKS = {  # name: half microbatches, on the fullest rank
    "zbv": lambda P: 2 * P,
    "v-half": lambda P: 2 * ((P + 2) // 2 if P % 2 == 0 else (P + 1) // 2),
    "v-min": lambda P: 2 * ((P + 4) // 3),
    "dualpipev": lambda P: 2 * P + 1,
}


def evaluate(text, **numbers):
    """A formula of the table of families, as it stands there."""
    text = re.sub(r"(\d) divides P", r"P % \1 == 0", text.replace("·", "*").replace("−", "-").replace(", else", " else"))
    return eval(text.replace("⌊", "floor(").replace("⌋", ")"), {"floor": math.floor, "max": max}, numbers)


class TestBubbles:
    @pytest.mark.parametrize("name", BUBBLES)
    def test_the_bubble_is_the_closed_form_in_simulation_and_in_the_reference(self, name):
        bubble, holds = BUBBLES[name]
        n_cases = 0
        for P, M, k, v in sizes(name):
            schedule = build(name, P, M, k, v)
            for f, i, w in TIMES:
                if not holds(P, M, k, v, f, i, w):
                    continue
                expected = M * f + (0 if name == "forward-only" else M * (i + w)) + bubble(P, M, k, v, f, i, w)
                assert tp.simulate(schedule, per_microbatch(k, v, f, i, w)).makespan_ms == pytest.approx(expected, **EXACT)
                length = {"F": f / k / v, "I": i / k / v, "W": w / k / v, "B": (i + w) / k / v}
                ends = times(as_text(schedule), lambda g, kind, m, s, length=length: length[kind]).values()
                assert max(end for _, end in ends) == pytest.approx(expected, **EXACT)
                n_cases += 1
        assert n_cases >= 3

    @pytest.mark.parametrize("name", BUBBLES)
    def test_the_table_of_families_says_the_same(self, name):
        bubble, holds = BUBBLES[name]
        text = tp.schedules().loc[name, "bubble"]
        for P, M, k, v in sizes(name):
            for f, i, w in TIMES:
                if holds(P, M, k, v, f, i, w):
                    said = evaluate(text, P=P, k=k, v=v, t_F=f, t_I=i, t_W=w, t_B=i + w)
                    assert said == pytest.approx(bubble(P, M, k, v, f, i, w), **EXACT)

    def test_short_of_its_condition_seq1f1b_zb_waits_longer(self):
        timeline = tp.simulate(build("seq1f1b-zb", 4, 1, 4, 1), per_microbatch(4, 1, 1.0, 1.0, 1.0))
        assert timeline.makespan_ms - 3 == pytest.approx(1.5, **EXACT)

    @pytest.mark.parametrize("name", ["zb-h2", "zbv"])
    def test_no_rank_idles_inside_its_own_span_where_f_i_and_w_take_the_same(self, name):
        for P in (1, 2, 4, 6):
            frame = tp.simulate(build(name, P, 2 * P + 1, 1, FAMILIES[name].chunks), per_microbatch(1, 1, 1, 1, 1)).frame
            spans = frame.groupby("rank").agg({"start_ms": "min", "end_ms": "max"})
            busy = (frame["end_ms"] - frame["start_ms"]).groupby(frame["rank"]).sum()
            assert (spans["end_ms"] - spans["start_ms"]).to_numpy() == pytest.approx(busy.to_numpy(), **EXACT)

    @pytest.mark.parametrize(("f", "i", "w"), TIMES)
    def test_zb_h2_idles_on_rank_0_for_p_minus_1_times_what_two_w_do_not_fill(self, f, i, w):
        for P, M in ((1, 1), (2, 3), (3, 8), (4, 7), (6, 12)):
            rank_0 = tp.simulate(build("zb-h2", P, M, 1, 1), per_microbatch(1, 1, f, i, w)).frame.query("rank == 0")
            span = rank_0["end_ms"].max() - rank_0["start_ms"].min()
            assert span - M * (f + i + w) == pytest.approx((P - 1) * max(0, f + i - 2 * w), **EXACT)


class TestPeaks:
    @pytest.mark.parametrize("name", PEAKS)
    def test_every_rank_holds_what_the_closed_form_says(self, name):
        text = tp.schedules().loc[name, "peak_activations"]
        for P, M, k, v in sizes(name):
            schedule = build(name, P, M, k, v)
            expected = [min(PEAKS[name](P, M, k, v, r), M * k * v) for r in range(P)]
            said = [min(evaluate(text, P=P, M=M, k=k, v=v, G=group(P, k), r=r), M) * k * v for r in range(P)]
            assert said == pytest.approx(expected)
            peaks = tp.simulate(schedule, per_microbatch(k, v, 1.0, 1.4, 0.6)).peak_in_flight()
            assert peaks.tolist() == expected

    @pytest.mark.parametrize("name", V_PEAKS)
    def test_the_fullest_rank_of_a_v_holds_what_the_closed_form_says(self, name):
        text = tp.schedules().loc[name, "peak_activations"]
        for P, M, _, _ in sizes(name):
            expected = min(V_PEAKS[name](P), 2 * M)
            assert 2 * min(evaluate(text, P=P), M) == pytest.approx(expected)
            peaks = tp.simulate(build(name, P, M, 1, 2), per_microbatch(1, 2, 1, 1, 1)).peak_in_flight()
            assert peaks.max() == expected if M >= 2 * P else peaks.max() <= expected


class TestKnownValues:
    """Published or independently computed numbers; t_B = 2 t_F unless said."""

    @staticmethod
    def simulate(name, P, M, k=1, v=None, f=1.0, i=1.0, w=1.0, **kwargs):
        v = v or FAMILIES[name].chunks
        return tp.simulate(build(name, P, M, k, v), per_microbatch(k, v, f, i, w), **kwargs)

    @pytest.mark.parametrize(
        ("P", "M", "v", "overhead"),
        [(4, 8, 2, 0.1875), (4, 16, 4, 0.0469), (8, 16, 2, 0.2188), (12, 12, 4, 0.2292), (12, 24, 4, 0.1146)],
    )
    def test_the_overhead_of_interleaved_is_p_minus_1_over_mv(self, P, M, v, overhead):
        timeline = self.simulate("interleaved", P, M, v=v)
        assert timeline.bubble_overhead == pytest.approx((P - 1) / (M * v), **EXACT)
        assert timeline.bubble_overhead == pytest.approx(overhead, abs=5e-5)

    def test_4_ranks_4_slices_wait_0_75_under_seq1f1b_zb_2_25_unsplit_and_3_unsliced(self):
        for M in (2, 3, 8):
            ideal = 3 * M
            assert self.simulate("seq1f1b-zb", 4, M, 4).makespan_ms - ideal == pytest.approx(0.75, **EXACT)
            assert self.simulate("seq1f1b", 4, M, 4).makespan_ms - ideal == pytest.approx(2.25, **EXACT)
        assert self.simulate("zb-h1", 4, 8).makespan_ms - 24 == pytest.approx(3.0, **EXACT)

    def test_v_min_pays_for_unlike_costs(self):
        """1 / 1.4 / 0.6 on 4 ranks with 24 microbatches: a bubble of 34.5, 1f1b's is 9."""
        costs = {"f": 1.0, "i": 1.4, "w": 0.6}
        assert self.simulate("v-min", 4, 24, **costs).makespan_ms - 72 == pytest.approx(34.5, **EXACT)
        assert self.simulate("1f1b", 4, 24, **costs).makespan_ms - 72 == pytest.approx(9.0, **EXACT)

    def test_1f1b_buys_memory_not_time(self):
        """P=4, M=8: both 33, peaks 8 and 4; with a latency of 0.3, gpipe 34.8 and 1f1b 37.8."""
        link = tp.Link(latency_ms=0.3)
        assert [self.simulate(name, 4, 8).makespan_ms for name in ("gpipe", "1f1b")] == pytest.approx([33, 33], **EXACT)
        assert [self.simulate(name, 4, 8).peak_in_flight().max() for name in ("gpipe", "1f1b")] == [8, 4]
        slowed = [self.simulate(name, 4, 8, link=link).makespan_ms for name in ("gpipe", "1f1b")]
        assert slowed == pytest.approx([34.8, 37.8], **EXACT)

    def test_8_ranks_16_microbatches_4_slices(self):
        cases = [("seq1f1b", 8, 16, 4), ("1f1b", 8, 16), ("terapipe", 8, 16, 4)]
        sliced, whole, all_first = (self.simulate(*case) for case in cases)
        assert sliced.bubble_overhead == pytest.approx(7 / 64, **EXACT)
        assert whole.bubble_overhead == pytest.approx(7 / 16, **EXACT)
        peaks = [sliced.peak_in_flight()[0] / 4, whole.peak_in_flight()[0], all_first.peak_in_flight()[0] / 4]
        assert peaks == [2.75, 8, 16]
        assert self.simulate("seq1f1b", 4, 16, 4).peak_in_flight()[0] / 4 == 1.75

    def test_equal_slices_waste_more_than_whole_microbatches_where_attention_dominates(self):
        """64K tokens, d = 6144, P = 8, M = 16, k = 4, FLOPs of the layers: overhead 0.479, in equal-FLOPs slices 0.109."""
        h, n = 6144, 65536

        def flops(scale):
            def work(l, c, b):
                l, c = np.asarray(l, dtype=float), np.asarray(c, dtype=float)
                return scale * (24 * l * h**2 + 4 * l * h * (c + l - l / 2)) / (24 * n * h**2 + 2 * h * n**2)

            return work

        cost = tp.CallableCost(flops(1.0), flops(2.0))
        overheads = {}
        for row in ([16384] * 4, [23474, 16619, 13620, 11823], [65536]):
            name = "seq1f1b" if len(row) > 1 else "1f1b"
            schedule = tp.build_schedule(name, 8, f"[(1, {row})] * 16")
            overheads[len(set(row)), len(row)] = tp.simulate(schedule, cost).bubble_overhead
        assert overheads[1, 4] == pytest.approx(0.479, abs=5e-4)
        assert overheads[4, 4] == pytest.approx(0.109, abs=5e-4)
        assert overheads[1, 1] == pytest.approx(0.4375, **EXACT)


class TestOrders:
    def test_one_stage_a_rank_makes_of_the_interleaved_families_those_they_come_from(self):
        for P, M, k in ((1, 1, 1), (2, 3, 2), (4, 2, 4)):
            plain = build("seq1f1b", P, M, k, 1).orders
            assert build("seq1f1b-interleaved", P, M, k, 1).orders == plain
            if k % P == 0:
                assert build("slimpipe", P, M, k, 1).orders == plain
            assert build("interleaved", P, M, 1, 1).orders == build("1f1b", P, M, 1, 1).orders

    def test_whole_microbatches_make_of_the_sliced_families_those_they_come_from(self):
        for P, M in ((1, 1), (2, 4), (4, 8)):
            assert build("seq1f1b-interleaved", P, M, 1, 3).orders == build("interleaved", P, M, 1, 3).orders
            assert build("seq1f1b-zb", P, M, 1, 1).orders == build("zb-h1", P, M, 1, 1).orders

    def test_slimpipe_of_several_stages_is_seq1f1b_interleaved_in_groups_of_one_microbatch(self):
        assert build("slimpipe", 2, 3, 4, 2).orders == build("seq1f1b-interleaved", 2, 3, 4, 2).orders

    @pytest.mark.parametrize("name", TWO_STAGES)
    def test_in_a_v_the_second_stage_of_rank_r_is_2p_minus_1_minus_r(self, name):
        assert build(name, 4, 8, 1, 2).stage_to_rank == (0, 1, 2, 3, 3, 2, 1, 0)

    @pytest.mark.parametrize("name", [*INTERLEAVED, "looped-bfs", "svpp"])
    def test_in_a_loop_stage_g_is_on_rank_g_mod_p(self, name):
        assert build(name, 2, 2, 1 if name == "interleaved" else 2, 3).stage_to_rank == (0, 1, 0, 1, 0, 1)

    def test_seq1f1b_zb_typed_out(self):
        schedule = tp.build_schedule("seq1f1b-zb", 2, "[(1, [4, 2])] * 2")
        assert [" ".join(order) for order in as_text(schedule)] == [
            "0F0.0 0F0.1 0F1.0 0I0.1 0W0.1 0F1.1 0I0.0 0W0.0 0I1.1 0W1.1 0I1.0 0W1.0",
            "1F0.0 1F0.1 1I0.1 1F1.0 1I0.0 1W0.1 1F1.1 1I1.1 1W0.0 1I1.0 1W1.1 1W1.0",
        ]

    def test_dualpipev_typed_out(self):
        assert [" ".join(order) for order in as_text(build("dualpipev", 2, 3, 1, 2))] == [
            "0F0.0 0F1.0 0F2.0 3F0.0 3I0.0 3W0.0 3F1.0 3B1.0 3F2.0 0B0.0 3B2.0 0I1.0 0W1.0 0I2.0 0W2.0",
            "1F0.0 2F0.0 1F1.0 2F1.0 1F2.0 2B0.0 2F2.0 1B0.0 2B1.0 1B1.0 2I2.0 1I2.0 2W2.0 1W2.0",
        ]

    @pytest.mark.parametrize("name", FAMILIES)
    def test_which_actions_it_uses_is_what_the_registry_says(self, name):
        kinds = {
            split(text)[1] for P, M, k, v in sizes(name)[-3:] for order in as_text(build(name, P, M, k, v)) for text in order
        }
        assert kinds == set(FAMILIES[name].kinds)
        assert FAMILIES[name].splits_backward == ("W" in kinds)


class TestRefusals:
    """Whatever is built can run; everything else is refused, with a family that can."""

    @given(slicings(max_tokens=24, max_microbatches=6, max_slices=6), st.integers(1, 6), st.sampled_from([None, 1, 2, 3]))
    @settings(PROPERTY, max_examples=100)
    def test_every_schedule_that_is_built_is_complete_and_never_deadlocks(self, slicing, P, chunks):
        for name, family in FAMILIES.items():
            message = refusal(name, P, slicing, chunks)
            if message:
                assert family.takes_slices != "any" or chunks is not None
                nearest = re.search(r"Use '([\w-]+)', the nearest family that can", message)
                assert nearest or "chunks_per_rank" in message
                if nearest:
                    other = chunks if FAMILIES[nearest[1]].any_chunks else None
                    assert not refusal(nearest[1], P, slicing, other)

    @pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
    @pytest.mark.parametrize("M", [1, 2, 3, 8, 17])
    def test_every_size_validates_or_is_refused(self, P, M):
        for name, k in product(FAMILIES, (1, 2, 3, 4)):
            message = refusal(name, P, tp.uniform_slicing(12, k, M))
            assert not message or "nearest family" in message

    @pytest.mark.parametrize("M", [1, 2])
    def test_one_and_two_microbatches_on_4_ranks(self, M):  # S7
        refused = set()
        for name in FAMILIES:
            try:
                timeline = tp.simulate(
                    tp.build_schedule(name, 4, tp.uniform_slicing(8, 1, M), **OPTIONS.get(name, {})),
                    per_microbatch(1, 1, 1, 1, 1),
                )
            except ScheduleError:
                refused.add(name)
            else:
                assert timeline.n_ranks == 4
                assert timeline.makespan_ms >= 3
        assert refused == {"interleaved", "seq1f1b-interleaved", "slimpipe", "dualpipev"}

    @pytest.mark.parametrize(
        ("name", "slicing", "nearest"),
        [
            ("gpipe", "[(1, [2, 2])]", "terapipe"),
            ("1f1b", "[(1, [2, 2])]", "seq1f1b"),
            ("zb-h1", "[(1, [2, 2])]", "seq1f1b-zb"),
            ("zb-h2", "[(1, [2, 2])]", "seq1f1b-zb"),
            ("zbv", "[(1, [2, 2])]", "seq1f1b-zb"),
            ("v-half", "[(1, [2, 2])]", "seq1f1b-zb"),
            ("v-min", "[(1, [2, 2])]", "seq1f1b-zb"),
            ("dualpipev", "[(1, [2, 2])] * 3", "seq1f1b-zb"),
            ("interleaved", "[(1, [2, 2])] * 2", "seq1f1b-interleaved"),
            ("interleaved", "[(1, [2, 2]), (1, [4])]", "seq1f1b"),
        ],
    )
    def test_whole_microbatch_families_quote_the_slicing_and_name_the_nearest(self, name, slicing, nearest):
        given_text, most = re.escape(str(tp.Slicing.parse(slicing))), 2
        message = (
            rf"^{name} runs whole microbatches; the slicing {given_text} has up to {most} slices in one\. Use '{nearest}', the"
        )
        with pytest.raises(ScheduleError, match=message):
            tp.build_schedule(name, 2, slicing)

    @pytest.mark.parametrize(
        ("name", "P", "slicing", "chunks", "message"),
        [
            ("seq1f1b-interleaved", 2, "[(1, [2, 2]), (1, [4])]", None, "has 1 in one and 2 in another. Use 'seq1f1b'"),
            ("slimpipe", 2, "[(1, [2, 2]), (1, [4])]", None, "has 1 in one and 2 in another. Use 'seq1f1b'"),
            ("slimpipe", 2, "[(1, [2, 2, 2])]", None, "3 a microbatch, for 2 ranks. Take 4 slices. Use 'seq1f1b'"),
            ("slimpipe", 2, "[(1, [5, 1])]", 2, "slices of 1 and 5 tokens. Use 'seq1f1b'"),
            ("interleaved", 4, "[(1, [4])] * 6", None, "groups of 4, and 6 microbatches of 1 slices are 6 units"),
            ("interleaved", 4, "[(1, [4])] * 6", 3, "Take 8 microbatches, or any multiple of 4. Use '1f1b'"),
            (
                "seq1f1b-interleaved",
                4,
                "[(1, [1, 1, 2])] * 3",
                None,
                "groups of 12, and 3 microbatches of 3 slices are 9 units",
            ),
            ("dualpipev", 4, "[(1, [4])] * 6", None, "at least 2P−1 = 7 microbatches on 4 ranks"),
            ("svpp", 2, "[(1, [2, 2]), (1, [4])]", 2, "svpp with 2 stages a rank needs as many slices"),
        ],
    )
    def test_counts_that_do_not_fit_are_refused_with_their_values(self, name, P, slicing, chunks, message):
        with pytest.raises(ScheduleError, match=re.escape(message)):
            tp.build_schedule(name, P, slicing, chunks, **OPTIONS.get(name, {}))

    def test_chunks_that_a_family_cannot_place_are_refused(self):
        with pytest.raises(
            ScheduleError, match=r"chunks_per_rank=3: seq1f1b places one stage .* Use chunks_per_rank=1 .*'interleaved'"
        ):
            tp.build_schedule("seq1f1b", 2, "[(1, [4])]", chunks_per_rank=3)
        for name in TWO_STAGES:
            with pytest.raises(ScheduleError, match=rf"chunks_per_rank=1: {name} places two stages .* Use chunks_per_rank=2"):
                tp.build_schedule(name, 2, "[(1, [4])] * 4", chunks_per_rank=1)
        for chunks in (0, True, 1.5):
            with pytest.raises(ScheduleError, match=f"chunks_per_rank={chunks}: needs an integer"):
                tp.build_schedule("interleaved", 2, "[(1, [4])] * 4", chunks_per_rank=chunks)

    def test_options_that_a_family_does_not_know_are_refused_with_the_nearest(self):
        with pytest.raises(ScheduleError, match=r"unknown option of svpp 'max_inflight'. Did you mean 'max_in_flight'"):
            tp.build_schedule("svpp", 2, "[(1, [4])]", max_inflight=3)
        todo = r"Give it: build_schedule\('svpp', …, max_in_flight=…\), and pass that Schedule .*RunSpec\(schedule=…\), sweep"
        with pytest.raises(ScheduleError, match=todo):
            tp.build_schedule("svpp", 2, "[(1, [4])]")
        with pytest.raises(ScheduleError, match=r"max_in_flight=3: seq1f1b has no options.* an option of svpp"):
            tp.build_schedule("seq1f1b", 2, "[(1, [4])]", max_in_flight=3)
        with pytest.raises(ScheduleError, match=r"zbv has no options. Leave it out.$"):
            tp.build_schedule("zbv", 2, "[(1, [4])]", anything=3)


class TestTable:
    def test_one_row_a_family_in_short_cells(self):
        table = tp.schedules()
        assert list(table.index) == list(FAMILIES)
        assert len(table) == 17
        assert table.map(lambda cell: len(str(cell))).max().max() <= 65
        assert table.loc["svpp", "options"] == "max_in_flight"
        assert set(table.index[table["splits_backward"]]) == {"zb-h1", "zb-h2", "seq1f1b-zb", *TWO_STAGES}
        assert set(table.index[table["runs_on"] == "simulator"]) == {"zb-h2", "v-half", "v-min", "dualpipev", "looped-bfs"}
        assert set(table.index[table["takes_slices"] == "whole"]) == set(WHOLE)
        assert (table["source"] != "").all()
