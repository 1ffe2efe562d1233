"""The slicing DP against exhaustive search, and against numbers found without it."""

import math
import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_costs import Table, batches
from reference import compositions
from strategies import PROPERTY

import terapipe as tp
from terapipe.errors import SlicingError
from terapipe.slicing import MicrobatchSlices

OBJECTIVES = ["paper", "two-phase"]
LINEAR = tp.CallableCost(lambda l, c, b: b * (2.0 + l + l * c / 64), lambda l, c, b: b * (1.0 + 3.0 * l))


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(seq_tokens=st.integers(1, 9), n_stages=st.sampled_from([1, 2, 3, 8, 96]), seed=st.integers(0, 2**32))
@settings(PROPERTY, max_examples=500)
def test_no_slicing_of_all_2_to_the_l_minus_1_is_better(objective, seq_tokens, n_stages, seed):
    table = Table(seq_tokens, random.Random(seed))
    least = table.least(seq_tokens, n_stages, objective)
    if math.isinf(least):
        with pytest.raises(SlicingError, match="forbidden"):
            tp.optimal_slicing(table.cost, seq_tokens, n_stages, objective=objective)
        return
    plan = tp.optimal_slicing(table.cost, seq_tokens, n_stages, objective=objective)
    assert plan.latency_ms == pytest.approx(least, rel=1e-12, abs=1e-12)
    assert plan.lower_bound_ms == plan.latency_ms
    assert tp.pipeline_latency_ms(plan.slicing, table.cost, n_stages, objective) == pytest.approx(plan.latency_ms, rel=1e-12)
    assert plan.slicing.seq_tokens == seq_tokens
    assert (plan.slicing.n_microbatches, plan.slicing.n_sequences) == (1, 1)
    assert (plan.objective, plan.n_stages) == (objective, n_stages)
    assert plan.n_programs >= 1


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(
    seq_tokens=st.integers(1, 4),
    batch_sequences=st.integers(1, 4),
    n_stages=st.sampled_from([1, 2, 3, 8, 96]),
    seed=st.integers(0, 2**32),
)
@settings(PROPERTY, max_examples=500)
def test_no_split_of_a_batch_and_no_slicing_of_its_sequences_is_better(objective, seq_tokens, batch_sequences, n_stages, seed):
    table = Table(seq_tokens, random.Random(seed), batch_sequences)
    every = batches(batch_sequences, list(compositions(seq_tokens)))
    least = min(table.latency(cuts, n_stages, objective) for cuts in every)
    if math.isinf(least):
        with pytest.raises(SlicingError, match="forbidden"):
            tp.optimal_slicing(table.cost, seq_tokens, n_stages, batch_sequences, objective=objective)
        return
    plan = tp.optimal_slicing(table.cost, seq_tokens, n_stages, batch_sequences, objective=objective)
    assert plan.latency_ms == pytest.approx(least, rel=1e-12, abs=1e-12)
    assert plan.lower_bound_ms == plan.latency_ms
    cuts = tuple((each.n_sequences, each.slice_tokens) for each in plan.slicing.microbatches)
    assert table.latency(cuts, n_stages, objective) == pytest.approx(least, rel=1e-12, abs=1e-12)
    assert (plan.slicing.n_sequences, plan.slicing.seq_tokens) == (batch_sequences, seq_tokens)


@given(seq_tokens=st.integers(1, 5), seed=st.integers(0, 2**32))
@PROPERTY
def test_the_splits_of_a_batch_are_each_listed_once(seq_tokens, seed):  # a law of the test's own search
    cuts = list(compositions(seq_tokens))
    every = [tuple(sorted(split)) for split in batches(3, cuts)]
    assert len(every) == len(set(every)) == len(cuts) + len(cuts) ** 2 + math.comb(len(cuts) + 2, 3)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(
    seq_tokens=st.integers(1, 7),
    most=st.integers(1, 4),
    n_stages=st.sampled_from([1, 2, 8, 96]),
    seed=st.integers(0, 2**32),
)
@settings(PROPERTY, max_examples=100)
def test_the_most_slices_allowed_leave_the_best_of_what_they_allow(objective, seq_tokens, most, n_stages, seed):
    table = Table(seq_tokens, random.Random(seed), 2)
    few = [cut for cut in compositions(seq_tokens) if len(cut) <= most]
    least = min(table.latency(cuts, n_stages, objective) for cuts in batches(2, few))
    if math.isinf(least):
        with pytest.raises(SlicingError, match="forbidden"):
            tp.optimal_slicing(table.cost, seq_tokens, n_stages, 2, objective=objective, max_slices=most)
        return
    plan = tp.optimal_slicing(table.cost, seq_tokens, n_stages, 2, objective=objective, max_slices=most)
    assert plan.latency_ms == pytest.approx(least, rel=1e-12, abs=1e-12)
    assert all(each.n_slices <= most for each in plan.slicing.microbatches)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(
    units=st.integers(1, 7),
    granularity=st.integers(1, 3),
    shortest=st.integers(1, 4),
    n_stages=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
@PROPERTY
def test_granularity_and_shortest_slice_leave_the_best_of_what_they_allow(
    objective, units, granularity, shortest, n_stages, seed
):
    rng, seq_tokens = random.Random(seed), units * granularity
    table = Table(seq_tokens, rng)
    table.forward = np.where(np.isinf(table.forward), 7.0, table.forward)
    table.backward = np.where(np.isinf(table.backward), 7.0, table.backward)
    shortest = min(shortest, seq_tokens)
    limits = {"granularity_tokens": granularity, "min_slice_tokens": shortest}
    plan = tp.optimal_slicing(table.cost, seq_tokens, n_stages, objective=objective, **limits)
    least = table.least(seq_tokens, n_stages, objective, granularity, shortest)
    assert plan.latency_ms == pytest.approx(least, rel=1e-12, abs=1e-12)
    assert all(length >= shortest and length % granularity == 0 for length in plan.slicing.microbatches[0].slice_tokens)


@given(seq_tokens=st.integers(1, 9), n_stages=st.sampled_from([2, 5, 48]), seed=st.integers(0, 2**32))
@PROPERTY
def test_t_max_is_the_slowest_slice_that_the_latency_counts(seq_tokens, n_stages, seed):
    table = Table(seq_tokens, random.Random(seed))
    for objective in OBJECTIVES:
        if math.isinf(table.least(seq_tokens, n_stages, objective)):
            return
        plan = tp.optimal_slicing(table.cost, seq_tokens, n_stages, objective=objective)
        alone = tp.pipeline_latency_ms(plan.slicing, table.cost, 1, objective)
        assert alone + (n_stages - 1) * plan.t_max_ms == pytest.approx(plan.latency_ms, rel=1e-12)


def test_with_one_stage_the_objectives_agree_and_nothing_is_gained_by_slicing():
    for objective in OBJECTIVES:
        plan = tp.optimal_slicing(LINEAR, 64, 1, objective=objective)
        assert str(plan.slicing) == "[(1, [64])]"


def test_the_two_phase_latency_of_apart_maxima_is_above_the_papers():  # honesty: eq. (5) is not the step time
    forward = tp.CallableCost(lambda l, c, b: np.where(c == 0, 1.0, 3.0), lambda l, c, b: np.where(c == 0, 4.0, 1.0))
    slicing = tp.Slicing.parse("[(1, [2, 2])]")
    assert tp.pipeline_latency_ms(slicing, forward, 3, "paper") == 9 + 2 * 5
    assert tp.pipeline_latency_ms(slicing, forward, 3, "two-phase") == 9 + 2 * (3 + 4)
    assert tp.pipeline_latency_ms(slicing, forward, 3) == 9 + 2 * (3 + 4)


def test_latency_counts_every_microbatch_with_its_sequences():
    slicing = tp.Slicing((MicrobatchSlices(1, (2, 2)), MicrobatchSlices(3, (4,))))
    f = [4.0, 4.0625, 3 * 6.0]
    b = [7.0, 7.0, 3 * 13.0]
    assert tp.pipeline_latency_ms(slicing, LINEAR, 4) == pytest.approx(sum(f) + sum(b) + 3 * (max(f) + max(b)))
    assert tp.pipeline_latency_ms(slicing, LINEAR, 4, "paper") == pytest.approx(sum(f) + sum(b) + 3 * (18 + 39))


@pytest.mark.parametrize("n_stages", [1, 2])
def test_the_latency_of_a_forbidden_slice_is_infinite(n_stages):
    cost = tp.CallableCost(lambda l, c, b: np.inf, lambda l, c, b: 1.0)
    assert tp.pipeline_latency_ms(tp.Slicing.parse("[(1, [2, 2])]"), cost, n_stages) == math.inf


# An analytic V100-like slice time in seconds, t(l, c) = (4.5e-5·max(l, f) + 6e-9·l·(c + l/2))·(96/K) + 2·(5e-5 + 4e-7·l):
# 96 layers over K stages, f the shortest slice that fills the device. Least eq. (5) latency for 2048 tokens cut at
# multiples of 8, found by an independent program that tries every t_max.
KNOWN_S = {
    (96, 8): 1.721439,
    (96, 24): 0.922283,
    (96, 48): 0.719315,
    (96, 96): 0.615617,
    (256, 8): 2.465272,
    (256, 24): 1.710828,
    (256, 48): 1.502243,
    (256, 96): 1.384989,
}


@pytest.mark.parametrize(("floor", "n_stages"), KNOWN_S)
def test_known_optima_of_2048_tokens_within_1e_6_s(floor, n_stages):
    def slice_ms(l, c, b):
        layer = 4.5e-5 * np.maximum(l, floor) + 6e-9 * l * (c + l / 2)
        return 1e3 * (layer * (96 / n_stages) + 2 * (5e-5 + 4e-7 * l))

    plan = tp.optimal_slicing(
        tp.CallableCost(slice_ms, lambda l, c, b: 0.0), 2048, n_stages, granularity_tokens=8, objective="paper"
    )
    assert plan.latency_ms / 1e3 == pytest.approx(KNOWN_S[floor, n_stages], abs=1e-6)
    assert plan.n_programs <= 100  # tens of DPs, not one for each of 32,896 values of t_max
    lengths = plan.slicing.microbatches[0].slice_tokens
    assert lengths[0] >= lengths[-1]  # later tokens attend to more: long slices come first


def test_a_cost_as_noisy_as_a_measured_one_takes_hundreds_of_dps_at_most():
    rng = np.random.default_rng(0)
    noise = 1 + 0.02 * rng.standard_normal((2, 129, 128))
    cost = tp.CallableCost(
        lambda l, c, b: (1 + 0.05 * l + 1e-4 * l * c) * noise[0, l, c],
        lambda l, c, b: (2 + 0.1 * l + 2e-4 * l * c) * noise[1, l, c],
    )
    plan = tp.optimal_slicing(cost, 128, 8)
    assert plan.n_programs <= 500
    assert plan.latency_ms <= min(tp.pipeline_latency_ms(tp.uniform_slicing(128, k), cost, 8) for k in range(1, 33))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seq_tokens": 0}, "seq_tokens=0"),
        ({"n_stages": 0}, "n_stages=0"),
        ({"granularity_tokens": 0}, "granularity_tokens=0"),
        ({"granularity_tokens": 3}, "granularity_tokens=3 does not divide seq_tokens=16"),
        ({"min_slice_tokens": 0}, "min_slice_tokens=0"),
        ({"min_slice_tokens": 17}, "min_slice_tokens=17 is more than seq_tokens=16. Use at most that"),
        ({"granularity_tokens": 5}, "use a divisor of it, e.g. 4"),
        ({"max_slices": 0}, "max_slices=0: needs an integer of at least 1"),
        ({"max_slices": 1.5}, "max_slices=1.5"),
        ({"batch_sequences": 0}, "batch_sequences=0"),
        ({"cost": [LINEAR]}, "1 cost models for 2 stages"),
        ({"cost": 3.0}, "cost=3.0: needs a CostModel"),
        ({"objective": "papers"}, r"unknown objective 'papers'. Did you mean 'paper'\?"),
        ({"objective": "twophase"}, r"Did you mean 'two-phase'\?"),
    ],
)
def test_sizes_and_objectives_that_cannot_be_are_refused_quoting_them(changes, said):
    with pytest.raises(SlicingError, match=said):
        tp.optimal_slicing(**{"cost": LINEAR, "seq_tokens": 16, "n_stages": 2, **changes})


def test_latency_refuses_an_unknown_objective_and_no_stages():
    slicing = tp.uniform_slicing(4, 2)
    with pytest.raises(SlicingError, match="unknown objective 'eq5'"):
        tp.pipeline_latency_ms(slicing, LINEAR, 2, "eq5")
    with pytest.raises(SlicingError, match="n_stages=0"):
        tp.pipeline_latency_ms(slicing, LINEAR, 0)


def test_where_every_slicing_is_forbidden_that_is_said():
    nothing = tp.CallableCost(lambda l, c, b: np.inf, lambda l, c, b: 1.0)
    with pytest.raises(
        SlicingError, match=r"every slice of seq_tokens=4 is forbidden.*min_slice_tokens=1.*Allow other lengths"
    ):
        tp.optimal_slicing(nothing, 4, 2)
    gap = tp.CallableCost(lambda l, c, b: np.where(c == 0, np.where(l == 4, np.inf, 1.0), np.inf), lambda l, c, b: 1.0)
    with pytest.raises(SlicingError, match=r"no slicing covers the sequence: .*look where the cost is infinite"):
        tp.optimal_slicing(gap, 4, 2)
    short = tp.CallableCost(lambda l, c, b: np.where(l > 2, np.inf, 1.0), lambda l, c, b: 1.0)
    with pytest.raises(SlicingError, match=r"in at most max_slices=3 slices.*Allow more slices"):
        tp.optimal_slicing(short, 8, 2, max_slices=3)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("hair", [1e-3, 1e-7, 1e-11])
def test_a_slowest_slice_shorter_by_a_hair_is_found_where_95_stages_repay_it(objective, hair):
    """(2, 1) has the least sum, (1, 2) a slowest slice shorter by a hair, for a sum larger by a hair."""
    times = {(2, 0): 1 + hair, (1, 2): 0.5, (1, 0): 0.5 + 2 * hair, (2, 1): 1.0}
    lookup = np.vectorize(lambda length, context: times.get((length, context), 9.0), otypes=[float])
    cost = tp.CallableCost(lambda l, c, b: lookup(l, c), lambda l, c, b: 0.0)
    assert str(tp.optimal_slicing(cost, 3, 96, objective=objective).slicing) == "[(1, [1, 2])]"
    assert str(tp.optimal_slicing(cost, 3, 1, objective=objective).slicing) == "[(1, [2, 1])]"


def test_one_token_is_one_slice():  # S22
    assert str(tp.optimal_slicing(LINEAR, 1, 4).slicing) == "[(1, [1])]"


@pytest.mark.parametrize("wrong", [np.nan, -1.0])
def test_a_cost_that_is_no_time_is_refused_with_the_slice(wrong):
    cost = tp.CallableCost(lambda l, c, b: np.where((l == 3) & (c == 2), wrong, 1.0), lambda l, c, b: 1.0)
    with pytest.raises(tp.TerapipeError, match=f"{wrong} ms at slice_tokens=3, context_tokens=2"):
        tp.optimal_slicing(cost, 8, 2)


def test_a_cost_that_knows_no_short_slices_is_asked_for_none():
    measured = tp.LinearContextCost((4, 16), (1.0, 3.0), (2.0, 6.0))
    assert min(tp.optimal_slicing(measured, 16, 4, min_slice_tokens=4).slicing.microbatches[0].slice_tokens) >= 4
    with pytest.raises(tp.TerapipeError, match=r"1 tokens is outside the measured 4…16.*min_slice_tokens"):
        tp.optimal_slicing(measured, 16, 4)


def test_messages_count_for_all_tokens_of_a_microbatch():
    """With slices that cost the same however many sequences, only their messages tell batches apart."""
    cost = tp.CallableCost(lambda l, c, b: 1.0 + 0.001 * b * l, lambda l, c, b: 1.0 + 0.001 * b * l)
    plan = tp.optimal_slicing(cost, 8, 1, batch_sequences=6)
    assert str(plan.slicing) == "[(6, [8])]"
    assert plan.latency_ms == pytest.approx(2 * (1 + 0.001 * 6 * 8))


def test_t_max_curve_has_its_least_at_the_optimum_and_its_terms_move_against_each_other():
    curve = tp.t_max_curve(LINEAR, 64, 8, granularity_tokens=2)
    plan = tp.optimal_slicing(LINEAR, 64, 8, granularity_tokens=2, objective="paper")
    best = curve[curve["optimal"]].iloc[0]
    assert best["latency_ms"] == pytest.approx(plan.latency_ms) == pytest.approx(curve["latency_ms"].min())
    assert best["n_slices"] == plan.slicing.microbatches[0].n_slices
    assert curve["sum_ms"].is_monotonic_decreasing
    assert np.allclose(curve["waiting_ms"], 7 * curve["t_max_ms"])
    assert np.allclose(curve["latency_ms"], curve["sum_ms"] + curve["waiting_ms"])
    with pytest.raises(SlicingError, match="n_points=1"):
        tp.t_max_curve(LINEAR, 64, 8, n_points=1)
    alike = tp.t_max_curve([LINEAR] * 8, 64, 8, granularity_tokens=2)
    assert alike["latency_ms"].tolist() == curve["latency_ms"].tolist()
    with pytest.raises(SlicingError, match="2 different costs"):
        tp.t_max_curve([LINEAR, tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: 1.0)], 64, 2)


def test_a_plan_that_chose_among_extrapolated_costs_says_so_even_if_its_own_slices_were_measured():
    frame = pd.DataFrame([(l, c) for l in (32, 64, 128) for c in (0, 32, 64)], columns=["slice_tokens", "context_tokens"])
    frame = frame.assign(forward_ms=100.0 + frame["slice_tokens"], backward_ms=1.0)
    bold = tp.TableCost(frame, extrapolate=True)
    rests_on_rivals = tp.optimal_slicing(bold, 128, 2)
    assert str(rests_on_rivals.slicing) == "[(1, [128])]"
    assert rests_on_rivals.extrapolated
    assert tp.t_max_curve(bold, 128, 2, granularity_tokens=8)["extrapolated"].all()
    within = tp.optimal_slicing(bold, 64, 2, granularity_tokens=32)  # the table has every slice of 64 tokens
    assert not within.extrapolated
