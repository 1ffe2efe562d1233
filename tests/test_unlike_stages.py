"""Stages that differ: the answer against exhaustive search, and the bound below it."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_costs import Table, batches
from reference import compositions
from strategies import PROPERTY

import terapipe as tp
from terapipe.slicing import MicrobatchSlices
from terapipe.slicing.paths import longest_path

OBJECTIVES = ["paper", "two-phase"]


def longest(times):
    """By the definition: the best of every way from the first slice on the first stage to the last on the last."""
    n_stages, n_slices = times.shape
    path = np.zeros((n_stages + 1, n_slices + 1))
    for stage in range(n_stages):
        for place in range(n_slices):
            path[stage + 1, place + 1] = max(path[stage, place + 1], path[stage + 1, place]) + times[stage, place]
    return path[-1, -1]


def latency(tables, cuts, objective):
    points = [(size, length, sum(cut[:place])) for size, cut in cuts for place, length in enumerate(cut)]
    forward, backward = (np.array([[getattr(table, kind)[point] for point in points] for table in tables]) for kind in KINDS)
    return longest(forward + backward) if objective == "paper" else longest(forward) + longest(backward)


KINDS = ("forward", "backward")


@st.composite
def unlike_tables(draw, max_tokens, max_batch):
    rng = random.Random(draw(st.integers(0, 2**32)))
    seq_tokens, batch = rng.randint(1, max_tokens), rng.randint(1, max_batch)
    distinct = [Table(seq_tokens, rng, batch) for _ in range(rng.randint(2, 3))]
    tables = [*distinct, *(rng.choice(distinct) for _ in range(rng.randint(0, 2)))]
    return tables, seq_tokens, batch


def plan_of(tables, seq_tokens, batch, objective, most=None):
    costs = [table.cost for table in tables]
    return tp.optimal_slicing(costs, seq_tokens, len(tables), batch, objective=objective, max_slices=most)


@given(unlike_tables(8, 1), st.sampled_from(OBJECTIVES), st.sampled_from([None, 1, 2, 3]))
@settings(PROPERTY, max_examples=500)
def test_one_sequence_the_bound_is_at_most_the_exhaustive_optimum_and_the_answer_at_least(case, objective, most):
    tables, seq_tokens, _ = case
    allowed = [cut for cut in compositions(seq_tokens) if most is None or len(cut) <= most]
    least = min(latency(tables, ((1, cut),), objective) for cut in allowed)
    if math.isinf(least):
        with pytest.raises(tp.TerapipeError, match="forbidden"):
            plan_of(tables, seq_tokens, 1, objective, most)
        return
    plan = plan_of(tables, seq_tokens, 1, objective, most)
    assert plan.lower_bound_ms <= least * (1 + 1e-12)
    assert plan.latency_ms == pytest.approx(least, rel=1e-11, abs=1e-12)  # few prefixes: the search is complete
    assert plan.lower_bound_ms == plan.latency_ms
    assert plan.gap == 0
    again = tp.pipeline_latency_ms(plan.slicing, [table.cost for table in tables], len(tables), objective)
    assert again == pytest.approx(plan.latency_ms, rel=1e-12)


@given(unlike_tables(3, 3), st.sampled_from(OBJECTIVES))
@settings(PROPERTY, max_examples=150)
def test_a_batch_the_bound_is_at_most_the_exhaustive_optimum_and_the_answer_at_least(case, objective):
    tables, seq_tokens, batch = case
    unordered = batches(batch, list(compositions(seq_tokens)))
    least = min(latency(tables, order, objective) for cuts in unordered for order in orders(cuts))
    if math.isinf(least):
        with pytest.raises(tp.TerapipeError, match="forbidden"):
            plan_of(tables, seq_tokens, batch, objective)
        return
    plan = plan_of(tables, seq_tokens, batch, objective)
    assert plan.lower_bound_ms <= least * (1 + 1e-12)
    assert plan.latency_ms >= least * (1 - 1e-12)
    assert plan.slicing.n_sequences == batch


def orders(cuts):
    from itertools import permutations

    return set(permutations(cuts))


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32))
@PROPERTY
def test_the_longest_path_is_that_of_its_definition(n_stages, n_slices, seed):
    times = np.random.default_rng(seed).uniform(0, 9, (n_stages, n_slices))
    assert longest_path(times) == pytest.approx(longest(times), rel=1e-14)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**32))
@PROPERTY
def test_on_stages_alike_the_longest_path_is_the_closed_form(n_stages, seq_tokens, seed):
    rng = random.Random(seed)
    table = Table(seq_tokens, rng)
    cut = rng.choice(list(compositions(seq_tokens)))
    slicing = tp.Slicing((MicrobatchSlices(1, cut),))
    for objective in OBJECTIVES:
        closed = tp.pipeline_latency_ms(slicing, table.cost, n_stages, objective)
        path = tp.pipeline_latency_ms(slicing, [table.cost] * n_stages, n_stages, objective)
        assert path == pytest.approx(closed, rel=1e-12)


def layer(scale, head_ms=0.0):
    def forward(l, c, b):
        return b * (scale * (0.05 + 4.5e-3 * np.maximum(l, 64) + 6e-7 * l * (c + l / 2)) + head_ms * l)

    return tp.CallableCost(forward, lambda l, c, b: 2 * forward(l, c, b))


def test_the_latency_of_unlike_stages_is_what_the_simulator_gives():
    costs = [layer(1, 5e-4), layer(1), layer(1.5), layer(1, 3e-3)]
    plan = tp.optimal_slicing(costs, 1024, 4, granularity_tokens=8)
    simulated = tp.simulate(tp.build_schedule("terapipe", 4, plan.slicing), costs)
    assert simulated.makespan_ms == pytest.approx(plan.latency_ms, rel=1e-12)


def test_a_head_on_the_last_stage_of_eight_is_solved_exactly_and_beats_equal_slices():
    costs = [layer(1)] * 7 + [layer(1, 3e-3)]
    plan = tp.optimal_slicing(costs, 2048, 8, granularity_tokens=8)
    assert plan.gap == 0
    equal = [tp.pipeline_latency_ms(tp.uniform_slicing(2048, k), costs, 8) for k in (1, 2, 4, 8, 16, 32, 64)]
    assert plan.latency_ms < min(equal)


def test_a_sequence_too_long_for_the_search_over_prefixes_gets_a_bound_and_a_gap():
    costs = [layer(1)] * 3 + [layer(1.5)]
    fine = tp.optimal_slicing(costs, 2048, 4, granularity_tokens=2)
    coarse = tp.optimal_slicing(costs, 2048, 4, granularity_tokens=16)
    assert coarse.gap == 0
    assert 0 < fine.gap < 0.2
    assert fine.lower_bound_ms < fine.latency_ms <= coarse.latency_ms


@pytest.mark.parametrize("batch", [1, 4])
def test_equal_slices_are_never_better(batch):
    costs = [layer(1 + 0.3 * (stage % 3), 1e-3 * (stage % 2)) for stage in range(6)]
    plan = tp.optimal_slicing(costs, 512, 6, batch_sequences=batch, granularity_tokens=16)
    for n_slices in (1, 2, 4, 8, 16, 32):
        equal = tp.uniform_slicing(512, n_slices, batch)
        assert plan.latency_ms <= tp.pipeline_latency_ms(equal, costs, 6) * (1 + 1e-12)


def test_stages_with_equal_costs_are_alike_though_each_has_an_object_of_its_own():
    costs = [tp.LinearContextCost((1, 64), (1.0, 20.0), (2.0, 40.0)) for _ in range(4)]
    plan, alike = tp.optimal_slicing(costs, 64, 4), tp.optimal_slicing(costs[0], 64, 4)
    assert (plan.slicing, plan.n_programs) == (alike.slicing, alike.n_programs)
