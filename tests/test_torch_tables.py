"""The families against the operation tables of torch.distributed.pipelining: the same orders, or the same makespans.

The tables are private to torch; where a version has none, there is nothing to compare with.
"""

from unittest.mock import create_autospec

import pytest
from reference import times

import terapipe as tp

visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

COSTS = [(1.0, 1.0, 1.0), (1.0, 1.4, 0.6), (0.7, 0.25, 1.3), (1.0, 0.5, 1.5)]


def torch_orders(name, P, M, v=None):
    """Every rank's actions as text, as they stand in torch's table; a pair that overlaps one behind the other."""
    table = visualizer.get_schedule_ops(name, P, M, v)
    actions = [[each for action in row if action is not None for each in (action.sub_actions or (action,))] for row in table]
    return [[f"{each}.0" for each in row if each.computation_type is not schedules.REDUCE_GRAD] for row in actions]


def our_orders(name, P, M, v=None):
    schedule = tp.build_schedule(name, P, tp.uniform_slicing(4, 1, M), v)
    return [[str(action) for action in order] for order in schedule.orders]


def makespan(orders, f, i, w, v):
    length = {"F": f / v, "I": i / v, "W": w / v, "B": (i + w) / v}
    return max(end for _, end in times(orders, lambda g, kind, m, s: length[kind]).values())


def simulated(name, P, M, v, f, i, w):
    cost = tp.CallableCost(*(lambda l, c, n, t=t: 0 * l + t / v for t in (f, i + w, w)))
    return tp.simulate(tp.build_schedule(name, P, tp.uniform_slicing(4, 1, M), v), cost).makespan_ms


@pytest.mark.parametrize(("P", "M"), [(1, 1), (2, 3), (4, 8), (8, 4)])
def test_gpipe_is_torchs_but_for_the_backwards_which_run_last_microbatch_first(P, M):
    for costs in COSTS:
        assert simulated("gpipe", P, M, 1, *costs) == pytest.approx(makespan(torch_orders("GPipe", P, M), *costs, 1))


@pytest.mark.parametrize(("P", "M"), [(2, 2), (2, 8), (4, 4), (4, 9), (8, 16)])
def test_1f1b_is_torchs_order(P, M):
    """torch's table numbers the forwards of the last rank from 1: there, only the kinds can be compared."""
    theirs, ours = torch_orders("1F1B", P, M), our_orders("1f1b", P, M)
    assert theirs[:-1] == ours[:-1]
    assert ["F" in text for text in theirs[-1]] == ["F" in text for text in ours[-1]]


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("P", "rounds"), [(1, 2), (2, 1), (2, 4), (4, 1), (4, 2), (8, 2)])
def test_interleaved_is_torchs_order(P, rounds, v):
    assert our_orders("interleaved", P, P * rounds, v) == torch_orders("Interleaved1F1B", P, P * rounds, v)


@pytest.mark.parametrize(("P", "M", "v"), [(2, 2, 2), (4, 4, 2), (4, 8, 3)])
def test_looped_bfs_is_torchs_order(P, M, v):
    assert our_orders("looped-bfs", P, M, v) == torch_orders("LoopedBFS", P, M, v)


@pytest.mark.parametrize(("P", "M"), [(1, 1), (2, 2), (2, 6), (4, 5), (4, 8), (4, 24), (8, 16)])
def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank(P, M, monkeypatch):
    mocked = create_autospec(schedules._PipelineStageBase, instance=True)
    mocked.group_rank, mocked.group_size, mocked.num_stages, mocked.submod = 0, P, P, None
    monkeypatch.setattr(schedules.ScheduleInterleavedZeroBubble, "_prepare_schedule_with_comms", lambda *_: None)
    monkeypatch.setattr(schedules.ScheduleInterleavedZeroBubble, "_add_bubbles_to_actions", lambda self, _: self.pipeline_order)
    rows = schedules.ScheduleInterleavedZeroBubble([mocked], M).pipeline_order
    texts = [[f"{each}.0" for each in rows[rank] if each is not None] for rank in range(P)]
    assert our_orders("zb-h1", P, M) == texts


@pytest.mark.parametrize(("P", "M", "v"), [(2, 2, 2), (2, 4, 3), (4, 4, 2), (4, 8, 2), (8, 8, 2)])
def test_torchs_interleaved_zero_bubble_table_takes_the_same_here_and_in_the_reference(P, M, v):
    orders = torch_orders("InterleavedZeroBubble", P, M, v)
    schedule = tp.Schedule.from_orders(dict(enumerate(orders)), tp.uniform_slicing(4, 1, M)).validate()
    for f, i, w in COSTS:
        cost = tp.CallableCost(*(lambda l, c, n, t=t: 0 * l + t / v for t in (f, i + w, w)))
        assert tp.simulate(schedule, cost).makespan_ms == pytest.approx(makespan(orders, f, i, w, v), rel=1e-9)


@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_zbv_is_torchs_order_from_2p_minus_1_microbatches(P, more):
    M = 2 * P - 1 + more
    theirs = torch_orders("ZBVZeroBubble", P, M)
    assert our_orders("zbv", P, M) == theirs
    for costs in COSTS:
        assert simulated("zbv", P, M, 2, *costs) == pytest.approx(makespan(theirs, *costs, 2), rel=1e-9)


def test_of_fewer_microbatches_torch_runs_what_is_left_of_2p_minus_1_and_zbv_skips_steps():
    """Torch plans for 2P−1 and leaves actions out: on 2 ranks, 2 microbatches wait 1.0 there, (P−1)/2 here."""
    assert makespan(torch_orders("ZBVZeroBubble", 2, 2), 1, 1, 1, 2) - 6 == pytest.approx(1.0)
    assert simulated("zbv", 2, 2, 2, 1, 1, 1) - 6 == pytest.approx(0.5)


@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_dualpipev_is_torchs_order(P, more):
    M = 2 * P + more  # torch asks for 2P, one more than the order needs
    theirs = torch_orders("DualPipeV", P, M)
    assert our_orders("dualpipev", P, M) == theirs
    for costs in COSTS:
        assert simulated("dualpipev", P, M, 2, *costs) == pytest.approx(makespan(theirs, *costs, 2), rel=1e-9)
