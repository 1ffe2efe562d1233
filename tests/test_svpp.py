"""svpp: the cap on units in flight is kept, and more memory never makes it slower."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import times
from strategies import PROPERTY, slicings

import terapipe as tp
from terapipe.errors import ScheduleError

UNIT = tp.CallableCost(lambda l, c, n: np.ones(np.shape(l)), lambda l, c, n: np.full(np.shape(l), 2.0))


def build(P, slicing, f, v=1):
    return tp.build_schedule("svpp", P, slicing, v, max_in_flight=f)


def most_in_flight(order):
    """Counted on the order itself: a forward takes room, a backward gives it back."""
    held, most = 0, 0
    for action in order:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


def unit_makespan(schedule):
    """From the order-level reference: 1 a forward, 2 a backward."""
    orders = [[str(action) for action in order] for order in schedule.orders]
    return max(end for _, end in times(orders, lambda g, kind, m, s: 1.0 if kind == "F" else 2.0).values())


def assert_capped_and_never_slower(P, slicing, v, least, most):
    before = float("inf")
    for f in range(least, most + 1):
        schedule = build(P, slicing, f, v).validate()
        assert max(map(most_in_flight, schedule.orders)) <= f
        timeline = tp.simulate(schedule, UNIT)
        assert timeline.peak_in_flight().max() <= f
        assert timeline.makespan_ms == pytest.approx(unit_makespan(schedule))
        assert timeline.makespan_ms <= before
        before = timeline.makespan_ms


def test_4_ranks_4_microbatches_of_4_slices_wait_9_then_8_25_then_7_5_then_2_25():
    cost = tp.CallableCost(lambda l, c, n: np.full(np.shape(l), 0.25), lambda l, c, n: np.full(np.shape(l), 0.5))
    slicing = tp.uniform_slicing(64, 4, 4)
    bubbles = {f: tp.simulate(build(4, slicing, f), cost).makespan_ms - 12 for f in (4, 5, 6, 7, 8, 99)}
    assert bubbles == pytest.approx({4: 9.0, 5: 8.25, 6: 7.5, 7: 2.25, 8: 2.25, 99: 2.25}, rel=1e-9)


@given(slicings(max_tokens=12, max_microbatches=4, max_slices=5), st.integers(1, 4))
@settings(PROPERTY, max_examples=30)
def test_the_cap_is_kept_and_a_larger_one_is_never_slower_for_unequal_slices(slicing, P):
    k = max(microbatch.n_slices for microbatch in slicing.microbatches)
    assert_capped_and_never_slower(P, slicing, 1, k, k + P + 1)


@pytest.mark.parametrize(
    ("P", "M", "k", "v"), [(2, 2, 2, 2), (2, 4, 1, 3), (3, 2, 3, 2), (4, 2, 2, 2), (2, 2, 3, 2), (1, 2, 2, 3)]
)
def test_the_cap_is_kept_and_a_larger_one_is_never_slower_with_several_stages_a_rank(P, M, k, v):
    group = k if k % P == 0 else P if P % k == 0 else P * k
    least = (v - 1) * group + k
    assert_capped_and_never_slower(P, tp.uniform_slicing(12 * k, k, M), v, least, least + 2 * P)
    with pytest.raises(ScheduleError, match=f"max_in_flight={least - 1}: svpp needs at least {least} units"):
        build(P, tp.uniform_slicing(12 * k, k, M), least - 1, v)


@pytest.mark.parametrize(("P", "M", "k", "v"), [(2, 3, 2, 1), (4, 4, 4, 1), (8, 2, 1, 1), (2, 4, 2, 2), (4, 4, 1, 3)])
def test_with_room_enough_it_is_no_slower_than_the_order_that_it_caps(P, M, k, v):
    slicing = tp.uniform_slicing(12 * k, k, M)
    uncapped = tp.build_schedule("seq1f1b" if v == 1 else "seq1f1b-interleaved", P, slicing, v)
    assert unit_makespan(build(P, slicing, 10**6, v)) <= unit_makespan(uncapped)


@pytest.mark.parametrize("f", [0, -1, 1.5, True, None, "7"])
def test_a_cap_that_is_no_count_is_refused(f):
    with pytest.raises(ScheduleError, match=f"max_in_flight={f!r}: needs an integer"):
        build(2, "[(1, [2, 2])]", f)


def test_a_cap_below_the_slices_of_a_microbatch_is_refused_with_the_least():
    with pytest.raises(ScheduleError, match=r"max_in_flight=2: svpp needs at least 3 units .* Give max_in_flight=3 or more"):
        build(2, "[(1, [4]), (1, [2, 1, 1])]", 2)
    with pytest.raises(
        ScheduleError, match=r"svpp needs the option max_in_flight: the most units on any rank, at least \(v−1\)·G \+ k"
    ):
        tp.build_schedule("svpp", 2, "[(1, [4])]")
