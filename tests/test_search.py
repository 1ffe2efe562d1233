"""Searching slicings: the kernel against the simulator, the bound and the answer against every slicing there is."""

import itertools
import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import compositions
from strategies import PROPERTY

import terapipe as tp
from terapipe.errors import ConfigError, CostError, ScheduleError, SlicingError
from terapipe.schedule import FAMILIES
from terapipe.search import bound
from terapipe.search.replay import Replay

EXACT = {"rel": 1e-9, "abs": 1e-9}
MODEL = tp.ModelConfig(2, 64, 4)
WIDTH = 6144


def random_cost(seed: int, seq_tokens: int, lumpy: bool = True) -> tp.CallableCost:
    """Any costs at all, or (not lumpy) a launch overhead and work that rises."""
    rng = np.random.default_rng(seed)
    if lumpy:
        tables = rng.choice([0.0, 1.0, *(rng.random(5) * 4)], size=(2, seq_tokens + 1, seq_tokens + 1))
        return tp.CallableCost(lambda l, c, b: tables[0][l, c], lambda l, c, b: tables[1][l, c])
    overhead, slope = rng.random(2) * (4, 0.3) + (2, 0)
    return tp.CallableCost(
        lambda l, c, b: overhead + l * (1 + slope * (c + l / 2)),
        lambda l, c, b: 2 * overhead + 2 * l * (1 + slope * (c + l / 2)),
    )


def flops_ms(n, c, b):
    """FLOPs of a slice of n tokens ending at p: 24·n·h² + 4·n·h·(p − n/2), in units of 10⁹."""
    return 1e-9 * (24 * n * WIDTH**2 + 4 * n * WIDTH * (c + n / 2))


FLOPS = tp.CallableCost(flops_ms, lambda n, c, b: 2 * flops_ms(n, c, b))


def makespan(lengths, cost, n_ranks, n_microbatches, family) -> float:
    slicing = tp.Slicing.parse(f"[(1, {list(lengths)})] * {n_microbatches}")
    return tp.simulate(tp.build_schedule(family, n_ranks, slicing), cost).makespan_ms


class TestReplay:
    @given(
        st.sampled_from(["terapipe", "seq1f1b"]), st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.integers(0, 999)
    )
    @settings(PROPERTY, max_examples=100)
    def test_the_kernel_takes_the_simulators_time(self, family, n_ranks, n_microbatches, n_slices, seed):
        rng = np.random.default_rng(seed)
        forward, backward = rng.choice([0.0, 1.0, *rng.random(4)], size=(2, 3, n_slices))
        found = Replay(family, n_ranks, n_microbatches, n_slices).makespans_ms(forward, backward)
        for case in range(3):
            cost = tp.CallableCost(lambda l, c, b, t=forward[case]: t[c], lambda l, c, b, t=backward[case]: t[c])
            assert found[case] == pytest.approx(makespan([1] * n_slices, cost, n_ranks, n_microbatches, family), **EXACT)

    @pytest.mark.parametrize("family", ["gpipe", "1f1b"])
    def test_families_of_whole_microbatches_too(self, family):
        cost = random_cost(1, 9)
        replay = Replay(family, 4, 5, 1)
        times = [np.array([[function(9, 0)]]) for function in (cost.forward_ms, cost.backward_ms)]
        assert replay.makespans_ms(*times) == pytest.approx(makespan([9], cost, 4, 5, family))

    @given(
        st.sampled_from(["terapipe", "seq1f1b"]), st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.integers(0, 999)
    )
    @PROPERTY
    def test_its_peaks_are_the_memory_models(self, family, n_ranks, n_microbatches, n_slices, seed):
        lengths = np.random.default_rng(seed).integers(1, 9, size=(2, n_slices))
        memory = tp.MemoryModel(MODEL, n_layers=1)
        found = Replay(family, n_ranks, n_microbatches, n_slices).peak_bytes(memory, lengths)
        for row, peak in zip(lengths.tolist(), found, strict=True):
            schedule = tp.build_schedule(family, n_ranks, f"[(1, {row})] * {n_microbatches}")
            assert peak == memory.peak_bytes(schedule).max()


class TestAgainstEverySlicing:
    """Bound ≤ the best of all 2^(L−1) slicings ≤ what is found, which is the best on most of these small cases."""

    CASES = tuple(itertools.product(["terapipe", "seq1f1b"], [1, 2, 4], [1, 2, 5], range(2)))

    @staticmethod
    def best_of_all(cost, seq_tokens, *step, n_slices=None) -> float:
        cuts = [cut for cut in compositions(seq_tokens) if n_slices in (None, len(cut))]
        return min(makespan(cut, cost, *step) for cut in cuts)

    @pytest.mark.parametrize("lumpy", [True, False])
    def test_bound_best_and_answer_are_in_order(self, lumpy):
        n_best = 0
        for family, n_ranks, n_microbatches, seed in self.CASES:
            cost = random_cost(seed, 6, lumpy)
            best = self.best_of_all(cost, 6, n_ranks, n_microbatches, family)
            found = tp.search_slicing(cost, 6, n_ranks, n_microbatches, family)
            assert found.bound_holds_for == "any cost"
            assert found.lower_bound_ms <= best * (1 + 1e-12) <= found.makespan_ms * (1 + 2e-12)
            n_best += found.makespan_ms <= best * (1 + 1e-12)
        assert n_best >= (0.75 if lumpy else 0.95) * len(self.CASES)

    def test_with_the_number_of_slices_given(self):
        for n_slices, n_microbatches, seed in itertools.product([1, 2, 3, 7], [1, 3], range(3)):
            cost = random_cost(seed, 7)
            best = self.best_of_all(cost, 7, 3, n_microbatches, "seq1f1b", n_slices=n_slices)
            found = tp.search_slicing(cost, 7, 3, n_microbatches, n_slices=n_slices)
            assert found.slicing.microbatches[0].n_slices == n_slices
            assert found.lower_bound_ms <= best * (1 + 1e-12) <= found.makespan_ms * (1 + 2e-12)

    def test_the_bound_of_one_microbatch_is_the_slicing_dps_optimum_and_the_answer_meets_it(self):
        for seed in range(8):
            cost = random_cost(seed, 24, lumpy=False)
            found = tp.search_slicing(cost, 24, 5)
            assert found.lower_bound_ms == tp.optimal_slicing(cost, 24, 5).latency_ms
            assert found.gap == pytest.approx(0, abs=1e-9)

    @pytest.mark.parametrize("seed", range(6))
    def test_on_a_very_fine_grid_the_bound_holds_where_cutting_saves_no_time(self, seed, monkeypatch):
        monkeypatch.setattr(bound, "MAX_UNITS", 3)
        monkeypatch.setattr(bound, "CHECKED_UNITS", 4)
        cost = random_cost(seed, 8, lumpy=False)
        found = tp.search_slicing(cost, 8, 4, 3)
        assert found.bound_holds_for == "costs where cutting a slice saves no time (none of a grid of 2 tokens does)"
        assert found.lower_bound_ms <= self.best_of_all(cost, 8, 4, 3, "seq1f1b") * (1 + 1e-12)

    def test_on_a_very_fine_grid_there_is_no_bound_where_cutting_saves_time(self, monkeypatch):
        monkeypatch.setattr(bound, "MAX_UNITS", 3)
        found = tp.search_slicing(tp.CallableCost(lambda l, c, b: l**2, lambda l, c, b: l**2), 8, 4, 3)
        assert (found.bound_holds_for, np.isnan(found.lower_bound_ms), np.isnan(found.gap)) == ("", True, True)


class TestLongSequences:
    """64K tokens, 8 ranks, 16 microbatches, FLOPs as cost: equal slices are worse than no slices."""

    STEP = (65_536, 8, 16)

    @staticmethod
    def overhead(slicing) -> float:
        return tp.simulate(tp.build_schedule("seq1f1b", 8, slicing), FLOPS).bubble_overhead

    def test_four_slices_of_equal_length_waste_0_479_and_of_equal_flops_0_109(self):
        assert self.overhead("[(1, [16384] * 4)] * 16") == pytest.approx(0.479, abs=5e-4)
        assert self.overhead("[(1, [23474, 16619, 13620, 11823])] * 16") == pytest.approx(0.109, abs=5e-4)

    def test_the_best_four_slices_are_found_to_the_token(self):
        found = tp.search_slicing(FLOPS, *self.STEP, n_slices=4)
        assert self.overhead(found.slicing) <= self.overhead("[(1, [23474, 16619, 13620, 11823])] * 16")
        assert found.gap < 0.11

    def test_more_slices_are_better_where_slices_cost_nothing_extra(self):
        found = tp.search_slicing(FLOPS, *self.STEP)
        assert self.overhead(found.slicing) < 0.008
        assert found.slicing.microbatches[0].n_slices == 64
        assert tp.search_slicing(FLOPS, *self.STEP, max_slices=8).slicing.microbatches[0].n_slices == 8


class TestAnswers:
    COST = random_cost(3, 96, lumpy=False)

    def test_the_step_reported_is_the_simulators_and_no_candidate_is_better(self):
        found = tp.search_slicing(self.COST, 96, 4, 6)
        assert found.makespan_ms == tp.simulate(found.schedule, self.COST).makespan_ms
        assert found.schedule.slicing == found.slicing
        assert found.schedule.name == "seq1f1b"
        assert set(found.slicing.microbatches) == {found.slicing.microbatches[0]}
        table = found.candidates
        assert table["makespan_ms"].min() == pytest.approx(found.makespan_ms)
        assert table["slicing"][0] == str(found.slicing)
        for row in table.itertuples():
            simulated = tp.simulate(tp.build_schedule("seq1f1b", 4, row.slicing), self.COST).makespan_ms
            assert row.makespan_ms == pytest.approx(simulated)
        assert found.n_evaluated > len(table)

    def test_it_is_no_worse_than_the_slicing_dp_and_equal_slices(self):
        for n_microbatches in (1, 2, 8):
            found = tp.search_slicing(self.COST, 96, 6, n_microbatches)
            others = [tp.optimal_slicing(self.COST, 96, 6).slicing] + [tp.uniform_slicing(96, k) for k in (1, 2, 4, 8)]
            for other in others:
                lengths = other.microbatches[0].slice_tokens
                assert found.makespan_ms <= makespan(lengths, self.COST, 6, n_microbatches, "seq1f1b") * (1 + 1e-9)

    def test_it_answers_the_same_every_time(self):
        answers = [tp.search_slicing(self.COST, 96, 4, 6) for _ in range(2)]
        assert answers[0].slicing == answers[1].slicing
        assert answers[0].candidates.equals(answers[1].candidates)

    def test_slices_are_on_the_grid_and_long_enough(self):
        found = tp.search_slicing(self.COST, 96, 4, 2, granularity_tokens=4, min_slice_tokens=10)
        lengths = found.slicing.microbatches[0].slice_tokens
        assert all(length % 4 == 0 and length >= 12 for length in lengths)

    @pytest.mark.parametrize("family", ["gpipe", "1f1b"])
    def test_families_of_whole_microbatches_get_the_whole_slice_proven(self, family):
        found = tp.search_slicing(self.COST, 96, 4, 6, family)
        assert str(found.slicing) == "[(1, [96])] * 6"
        assert found.gap == pytest.approx(0, abs=1e-12)

    def test_a_forbidden_slice_is_never_used(self):
        cost = tp.CallableCost(lambda l, c, b: np.where(l > 5, np.inf, 1.0 + l), lambda l, c, b: 2.0 + l)
        found = tp.search_slicing(cost, 24, 3, 2)
        assert max(found.slicing.microbatches[0].slice_tokens) <= 5


class TestMemoryCap:
    MEMORY = tp.MemoryModel(MODEL, n_layers=1)
    COST = random_cost(5, 24, lumpy=False)

    def peak(self, lengths, n_ranks, n_microbatches) -> float:
        schedule = tp.build_schedule("seq1f1b", n_ranks, f"[(1, {list(lengths)})] * {n_microbatches}")
        return self.MEMORY.peak_bytes(schedule).max()

    def test_no_answer_is_above_the_cap_or_faster_than_without_one(self):
        free = tp.search_slicing(self.COST, 24, 4, 6, memory=self.MEMORY)
        for cap in np.linspace(free.peak_bytes, self.least_refused(self.COST, 24, 4, 6), 5):
            found = tp.search_slicing(self.COST, 24, 4, 6, memory=self.MEMORY, memory_cap_bytes=cap)
            assert found.peak_bytes == self.peak(found.slicing.microbatches[0].slice_tokens, 4, 6) <= cap
            assert found.makespan_ms >= free.makespan_ms * (1 - 1e-9)
        assert not found.candidates["fits"].all()
        assert found.candidates["fits"][0]

    def least_refused(self, *step) -> int:
        with pytest.raises(SlicingError, match="the least found needs") as refusal:
            tp.search_slicing(*step, memory=self.MEMORY, memory_cap_bytes=1)
        return int(str(refusal.value).split("found needs ")[1].split()[0])

    @pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(2, 1), (2, 3), (4, 2), (4, 5)])
    def test_a_cap_below_any_slicing_is_refused_with_the_least_there_is(self, n_ranks, n_microbatches):
        least = min(self.peak(cut, n_ranks, n_microbatches) for cut in compositions(8))
        assert self.least_refused(self.COST, 8, n_ranks, n_microbatches) == least

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"memory_cap_bytes": 1e9}, "memory_cap_bytes=1000000000.0 without memory="),
            ({"memory": "lots", "memory_cap_bytes": 1e9}, "memory='lots': needs a MemoryModel"),
            ({"memory": MEMORY, "memory_cap_bytes": 0}, "memory_cap_bytes=0: needs a positive number"),
            ({"memory": MEMORY, "memory_cap_bytes": "1e9"}, "memory_cap_bytes='1e9': needs a positive number"),
        ],
    )
    def test_a_cap_that_means_nothing_is_refused(self, values, said):
        with pytest.raises(CostError, match=said):
            tp.search_slicing(self.COST, 24, 4, **values)

    def test_a_refusal_names_the_limit_that_may_be_the_cause(self):
        step = {"memory": self.MEMORY, "memory_cap_bytes": 1}
        with pytest.raises(SlicingError, match=r"the least found with at most max_slices=64 needs .* a larger max_slices"):
            tp.search_slicing(random_cost(5, 128, lumpy=False), 128, 4, 3, **step)
        with pytest.raises(SlicingError, match=r"under 1f1b, of whole microbatches, needs .* a family that takes slices"):
            tp.search_slicing(self.COST, 24, 4, 3, "1f1b", **step)

    def test_a_forbidden_slice_is_not_taken_for_one_that_needs_too_much(self):
        cost = tp.CallableCost(lambda l, c, b: np.where(l < 24, np.inf, 1.0), lambda l, c, b: 1.0)
        with pytest.raises(SlicingError, match=r"the least found needs .* with \[\(1, \[24\]\)\]"):
            tp.search_slicing(cost, 24, 4, memory=self.MEMORY, memory_cap_bytes=1)


class TestShortSlicesOnly:
    """Costs that forbid all but short slices: the default limit of 64 slices must not make a problem impossible."""

    @staticmethod
    def up_to(longest: int) -> tp.CallableCost:
        return tp.CallableCost(lambda l, c, b: np.where(l > longest, np.inf, 1), lambda l, c, b: 0 * l)

    @pytest.mark.parametrize("n_microbatches", [1, 2])
    def test_more_slices_are_found_where_64_are_too_few(self, n_microbatches):
        found = tp.search_slicing(self.up_to(5), 1024, 4, n_microbatches)
        lengths = found.slicing.microbatches[0].slice_tokens
        assert (len(lengths), max(lengths)) == (205, 5)  # ⌈1024 ÷ 5⌉: fewer are forbidden
        assert found.gap == pytest.approx(0) or n_microbatches > 1

    def test_and_where_the_first_numbers_of_slices_tried_are_all_forbidden(self):
        found = tp.search_slicing(self.up_to(40), 1024, 4, 2)
        assert found.slicing.microbatches[0].n_slices == 26

    @pytest.mark.parametrize(
        ("limits", "said"),
        [
            ({"max_slices": 64}, "with at most max_slices=64 has a slice of infinite cost. Allow a larger max_slices"),
            ({"n_slices": 3}, "with n_slices=3 has a slice of infinite cost. Allow another n_slices"),
            ({"schedule": "gpipe"}, "under gpipe, of whole microbatches, has .* Allow a family that takes slices"),
        ],
    )
    def test_limits_of_the_callers_are_kept_and_named(self, limits, said):
        with pytest.raises(SlicingError, match=said):
            tp.search_slicing(self.up_to(5), 1024, 4, **limits)


class TestExtrapolation:
    TABLE = pd.DataFrame(
        [(length, context, 1.0 + length, 2.0 + length) for length in (8, 16, 32) for context in (0, 32)],
        columns=["slice_tokens", "context_tokens", "forward_ms", "backward_ms"],
    )
    COST = tp.TableCost(TABLE, extrapolate=True)

    def test_an_answer_says_whether_a_slice_of_it_is_extrapolated(self):
        values = {"granularity_tokens": 8, "min_slice_tokens": 8}
        within, beyond = (tp.search_slicing(self.COST, length, 2, **values) for length in (32, 128))
        assert (within.extrapolated, beyond.extrapolated) == (False, True)
        assert tp.simulate(beyond.schedule, self.COST).source == "simulated, extrapolated"

    def test_a_comparison_says_so_row_by_row(self):
        table = tp.compare_slicings(self.COST, 64, 2, granularity_tokens=8, min_slice_tokens=8).set_index("method")
        assert table["extrapolated"].dtype == bool
        assert table.loc[["whole", "uniform 2"], "extrapolated"].tolist() == [True, False]


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"seq_tokens": 0}, SlicingError, "seq_tokens=0: needs an integer of at least 1"),
        ({"n_ranks": 0}, SlicingError, "n_ranks=0: needs an integer of at least 1"),
        ({"n_microbatches": 1.5}, SlicingError, "n_microbatches=1.5: needs an integer"),
        ({"granularity_tokens": 5}, SlicingError, "granularity_tokens=5 does not divide seq_tokens=24"),
        ({"n_slices": 25}, SlicingError, "25 slices of at least 1 tokens do not fit into seq_tokens=24"),
        ({"n_slices": 3, "min_slice_tokens": 9}, SlicingError, "3 slices of at least 9 tokens do not fit"),
        ({"n_slices": 3, "max_slices": 4}, SlicingError, "n_slices=3 and max_slices=4: give one"),
        ({"schedule": "seq1f1"}, ScheduleError, "unknown schedule 'seq1f1'. Did you mean 'seq1f1b'"),
        ({"schedule": "1f1b", "n_slices": 2}, ScheduleError, "1f1b runs whole microbatches"),
        ({"schedule": "seq1f1b-zb"}, ScheduleError, "seq1f1b-zb runs the halves of the backward apart.*tp.best_schedule"),
        ({"schedule": "interleaved"}, ScheduleError, "interleaved places 2 stages on each rank.*search for 'seq1f1b'"),
        ({"schedule": "svpp"}, ScheduleError, "svpp needs the option max_in_flight"),
        ({"schedule": "forward-only"}, ScheduleError, "forward-only runs forwards alone.*tp.compare_slicings"),
        ({"schedule": ["seq1f1b"]}, ScheduleError, "unknown schedule"),
        ({"cost": [FLOPS]}, CostError, "needs one CostModel"),
        ({"cost": tp.CallableCost(lambda l, c, b: np.inf, lambda l, c, b: 1)}, SlicingError, "infinite"),
    ],
)
def test_what_cannot_be_searched_is_refused(values, error, said):
    with pytest.raises(error, match=said):
        tp.search_slicing(**{"cost": FLOPS, "seq_tokens": 24, "n_ranks": 2} | values)


@pytest.mark.parametrize("name", [*FAMILIES])
def test_every_family_is_searched_or_refused_by_name(name):
    """Its own refusal comes before the replay, which knows F and B of one stage a rank."""
    family = FAMILIES[name]
    if family.kinds == "FB" and family.chunks == 1 and not family.options:
        found = tp.search_slicing(FLOPS, 24, 2, 3, name, granularity_tokens=12)
        assert tp.simulate(found.schedule, FLOPS).makespan_ms == pytest.approx(found.makespan_ms, rel=1e-12)
    else:
        with pytest.raises(ScheduleError, match=f"schedule='{name}': {name} .* Use tp"):
            tp.search_slicing(FLOPS, 24, 2, 3, name, granularity_tokens=12)


class TestCompareSlicings:
    COST = random_cost(7, 64, lumpy=False)

    def compare(self, *arguments, **values):
        return tp.compare_slicings(self.COST, 64, 4, *arguments, **values).set_index("method")

    def test_the_optimal_has_no_gap_and_the_others_do(self):
        table = self.compare(model=MODEL)
        names = ["optimal", "whole", "uniform 2", "uniform 4", "uniform 8", "uniform 16", "equal FLOPs"]
        assert list(table.index) == names
        columns = ["slicing", "n_slices", "latency_ms", "makespan_ms", "bubble_fraction", "slowest_ms", "gap", "regret"]
        assert list(table.columns) == [*columns, "extrapolated", "refused"]
        assert set(table["refused"]) == {""}
        plan = tp.optimal_slicing(self.COST, 64, 4)
        assert table.loc["optimal", "slicing"] == str(plan.slicing)
        assert table.loc["optimal", "gap"] == pytest.approx(0, abs=1e-12)
        assert (table["gap"].drop("optimal") > 0).all()
        assert table.loc["equal FLOPs", "n_slices"] == table.loc["optimal", "n_slices"]

    def test_latency_is_the_closed_form_and_under_terapipe_the_simulated_step(self):
        table = self.compare()
        for row in table.itertuples():
            assert row.latency_ms == pytest.approx(tp.pipeline_latency_ms(tp.Slicing.parse(row.slicing), self.COST, 4))
            assert row.makespan_ms == pytest.approx(row.latency_ms)
            units = tp.Slicing.parse(row.slicing).units[:, 2:].T
            assert row.slowest_ms == pytest.approx(self.COST.step_ms(*units).max())
        alone = tp.simulate(tp.build_schedule("terapipe", 4, tp.uniform_slicing(64, 4)), self.COST)
        assert table.loc["uniform 4", "bubble_fraction"] == pytest.approx(alone.bubble_fraction)

    def test_regret_is_the_worst_of_four_truths_each_against_its_own_optimum(self):
        regrets = []
        for own, context in itertools.product((0.9, 1.1), repeat=2):

            def scaled(function, own=own, context=context):
                return lambda l, c, b: own * function(l, 0, b) + context * (function(l, c, b) - function(l, 0, b))

            truth = tp.CallableCost(scaled(self.COST.forward_ms), scaled(self.COST.backward_ms))
            best = tp.optimal_slicing(truth, 64, 4).latency_ms
            regrets.append(tp.pipeline_latency_ms(tp.uniform_slicing(64, 4), truth, 4) / best - 1)
        table = self.compare()
        assert table.loc["uniform 4", "regret"] == pytest.approx(max(regrets))
        assert 0 <= table.loc["optimal", "regret"] < 0.05

    def test_the_step_is_simulated_with_the_schedule_and_its_microbatches(self):
        table = self.compare(n_microbatches=3, schedule="seq1f1b")
        assert table.loc["uniform 2", "slicing"] == "[(1, [32, 32])] * 3"
        assert table.loc["uniform 2", "makespan_ms"] == pytest.approx(makespan([32, 32], self.COST, 4, 3, "seq1f1b"))
        assert table["gap"].tolist() == self.compare()["gap"].tolist()  # of one microbatch

    def test_own_slicings_are_added_and_replace(self):
        mine = {"mine": "[(1, [40, 24])]", "whole": tp.Slicing.parse("[(1, [63, 1])] * 2")}
        table = self.compare(mine, n_microbatches=2)
        assert table.loc["mine", "slicing"] == "[(1, [40, 24])] * 2"
        assert table.loc["whole", "slicing"] == "[(1, [63, 1])] * 2"

    def test_a_forbidden_slice_has_no_step(self):
        cost = tp.CallableCost(lambda l, c, b: np.where(l > 32, np.inf, 1.0 + l), lambda l, c, b: 2.0 + l)
        table = tp.compare_slicings(cost, 64, 4).set_index("method")
        assert table.loc["whole", ["latency_ms", "makespan_ms", "gap", "regret"]].tolist() == [np.inf] * 4
        assert np.isnan(table.loc["whole", "bubble_fraction"])
        assert np.isfinite(table.loc["uniform 2", "regret"])

    NUMBERS = ("latency_ms", "makespan_ms", "bubble_fraction", "slowest_ms", "gap", "regret")

    def test_a_slicing_with_too_short_slices_is_kept_without_numbers(self):
        table = self.compare({"mine": "[(1, [60, 4])]"}, model=MODEL, min_slice_tokens=8, granularity_tokens=8)
        for method in ("uniform 16", "mine"):
            assert table.loc[method, "refused"] == "a slice of 4 tokens is shorter than min_slice_tokens=8."
            assert table.loc[method, list(self.NUMBERS)].isna().all()
        assert (table["refused"].drop(["uniform 16", "mine"]) == "").all()
        assert "uniform 16" not in tp.compare_slicings(self.COST, 8, 2)["method"].tolist()

    def test_a_slicing_that_the_cost_cannot_answer_for_is_kept_without_numbers(self):
        cost = tp.LinearContextCost((16, 128), (1.0, 8.0), (2.0, 16.0))
        table = tp.compare_slicings(cost, 128, 4, {"mine": "[(1, [127, 1])]"}, model=MODEL, granularity_tokens=16)
        refused = table[table["refused"] != ""]
        assert refused["method"].tolist() == ["uniform 16", "equal FLOPs", "mine"]
        assert refused["refused"].str.contains("tokens is outside the measured 16…128").all()
        assert refused[list(self.NUMBERS)].isna().to_numpy().all()
        assert not refused["extrapolated"].any()

    @pytest.mark.parametrize("family", ["gpipe", "1f1b"])
    def test_a_family_of_whole_microbatches_leaves_the_numbers_of_one(self, family):
        table, other = self.compare(n_microbatches=2, schedule=family), self.compare(n_microbatches=2)
        refused = table["refused"] != ""
        assert refused.tolist() == [True, False, True, True, True, True]
        assert table.loc[refused, "refused"].str.contains(f"{family} runs whole microbatches").all()
        assert table.loc[refused, ["makespan_ms", "bubble_fraction"]].isna().to_numpy().all()
        assert np.isfinite(table.loc["whole", "makespan_ms"])
        names = ["latency_ms", "slowest_ms", "gap", "regret"]
        assert table[names].equals(other[names])

    def test_an_optimum_without_an_answer_is_an_error_and_so_is_an_unknown_family(self):
        with pytest.raises(CostError, match="nan ms"):
            tp.compare_slicings(tp.CallableCost(lambda l, c, b: np.nan, lambda l, c, b: 1.0), 64, 4)
        with pytest.raises(ScheduleError, match="unknown schedule 'gpip'"):
            self.compare(schedule="gpip")

    def test_where_nothing_costs_anything_there_is_no_gap(self):
        free = tp.CallableCost(lambda l, c, b: 0 * l, lambda l, c, b: 0 * l)
        table = tp.compare_slicings(free, 32, 4)
        assert table[["gap", "regret"]].to_numpy().tolist() == [[0.0, 0.0]] * 6
        assert tp.search_slicing(free, 32, 4, 2).gap == 0

    def test_a_slicing_that_costs_is_infinitely_worse_than_one_that_does_not(self):
        cost = tp.CallableCost(lambda l, c, b: np.where(l == 32, 0.0, 1.0), lambda l, c, b: 0 * l)
        table = tp.compare_slicings(cost, 32, 4).set_index("method")
        assert table.loc[["optimal", "uniform 2"], "gap"].tolist() == [0, np.inf]

    def test_off_the_grid_a_slicing_may_be_better_than_the_optimal(self):
        table = self.compare(granularity_tokens=32)
        assert table.loc["optimal", "gap"] == 0
        assert table["gap"].min() < 0

    @pytest.mark.parametrize(
        ("values", "error", "said"),
        [
            ({"cost": [FLOPS] * 4}, CostError, "needs one CostModel, of one stage"),
            (
                {"slicings": ["[(1, [64])]"]},
                SlicingError,
                r"slicings=\['\[\(1, \[64\]\)\]'\]: needs {name: Slicing or notation}",
            ),
            ({"model": "x"}, ConfigError, "model='x': needs a ModelConfig"),
            ({"schedule": "zbv"}, ScheduleError, "zbv places 2 stages on each rank.*'seq1f1b', or tp.best_schedule"),
            ({"schedule": "looped-bfs"}, ScheduleError, "cost is of one stage"),
            ({"schedule": None}, ScheduleError, "unknown schedule None"),
        ],
    )
    def test_values_of_a_wrong_type_are_refused(self, values, error, said):
        with pytest.raises(error, match=said):
            tp.compare_slicings(**{"cost": FLOPS, "seq_tokens": 64, "n_ranks": 4} | values)

    @pytest.mark.parametrize(
        ("slicing", "said"),
        [
            ("[(1, [60])]", "needs 64 tokens in one microbatch"),
            ("[(2, [64])]", "of one sequence"),
            ("[(1, [64])] * 3", r"n_microbatches=2 alike"),
            ("[(1, [64]), (1, [32, 32])]", "alike"),
            (7, r"slicings\['mine'\]=7: needs a Slicing"),
        ],
    )
    def test_a_slicing_of_another_step_is_refused(self, slicing, said):
        with pytest.raises(SlicingError, match=said):
            self.compare({"mine": slicing}, n_microbatches=2)


def test_random_long_cases_never_beat_their_bound():
    rng = random.Random(0)
    for seed in range(12):
        cost = random_cost(seed, 240, lumpy=seed % 2 == 0)
        n_ranks, n_microbatches = rng.randint(1, 12), rng.randint(1, 12)
        found = tp.search_slicing(cost, 240, n_ranks, n_microbatches, rng.choice(["terapipe", "seq1f1b"]), granularity_tokens=4)
        assert found.gap >= -1e-9
