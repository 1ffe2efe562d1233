"""Emulated ranks: real processes and messages, slept time; they test the order and the runtime, not the cost."""

import numpy as np
import pandas as pd
import pytest
from tiny import MODEL, orders_of, planned, sleeps, spec

import terapipe as tp
from terapipe.errors import SpecError

pytestmark = pytest.mark.timeout(60)
COST = tp.CallableCost(lambda l, c, b: 10 + l / 2 + c / 8, lambda l, c, b: 15 + l, lambda l, c, b: 5 + l / 4)  # 11 ms and more


def emulated(directory, **values):
    return spec(directory, **{"n_ranks": 4, "n_steps": 3, "device": "emulated", "cost": COST} | values)


ZERO_BUBBLE = tp.Schedule.from_orders(
    {
        0: "0F0 0F1 0I0 0W0 0I1 0W1",
        1: "1F0 1F1 1I0 1W0 1I1 1W1",
        2: "2F0 2F1 2I0 2I1 2W0 2W1",
        3: "3F0 3I0 3F1 3I1 3W0 3W1",
    },
    "[(2, [8])] * 2",
)

CASES = {
    "terapipe": {"slicing": "[(1, [8, 5, 3])] * 2"},
    "1f1b": {"slicing": "[(1, [16])] * 5", "schedule": "1f1b"},
    "one cost a stage": {"slicing": "[(1, [8, 8])]", "cost": [sleeps(10 * stage, 20) for stage in (1, 2, 3, 1)]},
    "typed, backward in two halves": {"slicing": ZERO_BUBBLE.slicing, "schedule": ZERO_BUBBLE},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tp.Run]:
    root = tmp_path_factory.mktemp("emulated")
    return dict(zip(CASES, tp.run([emulated(root / name, **values) for name, values in CASES.items()]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_the_simulator_says_and_little_more(name, runs):  # measures time
    run = runs[name]
    simulated = tp.simulate(run.spec.schedules[0], run.spec.stage_costs)
    fastest = run.timeline.steps["makespan_ms"].min()  # other load on the machine can only add
    assert 0.99 * simulated.makespan_ms <= fastest <= 1.15 * simulated.makespan_ms


@pytest.mark.parametrize("name", CASES)
def test_every_rank_runs_its_actions_in_the_schedules_order(name, runs):
    run = runs[name]
    for _, rows in run.timeline.frame.groupby("step"):
        assert orders_of(rows) == planned(run.spec.schedules[0])


@pytest.mark.parametrize("name", CASES)
def test_no_action_sleeps_less_than_its_cost_and_none_starts_before_its_input_is_there(name, runs):
    run = runs[name]
    simulated = tp.simulate(run.spec.schedules[0], run.spec.stage_costs).frame
    place = ["stage", "kind", "microbatch", "slice"]
    costs = (simulated["end_ms"] - simulated["start_ms"]).to_numpy()
    for _, rows in run.timeline.measured.groupby("step"):
        slept = (rows["end_ms"] - rows["start_ms"]).set_axis(pd.MultiIndex.from_frame(rows[place]))
        assert (slept.loc[pd.MultiIndex.from_frame(simulated[place])].to_numpy() >= costs - 1e-3).all()
        assert (rows["ready_ms"] <= rows["start_ms"]).all()


def test_the_table_says_emulated_and_there_is_nothing_learned(runs):
    for run in runs.values():
        assert run.timeline.source == "emulated"
        assert set(run.timeline.frame["source"]) == {"emulated"}
        assert run.losses["loss"].isna().all()
        assert run.summary()["source"] == "emulated"


def test_messages_are_real(runs):
    sent = runs["terapipe"].timeline.measured.query("step == 0 and rank == 0 and kind == 'F'")["n_bytes"]
    assert sent.tolist() == [tokens * MODEL.d_model * 4 for tokens in (8, 5, 3)] * 2
    halves = runs["typed, backward in two halves"].timeline.measured.query("step == 0 and rank == 3")
    assert (halves.query("kind == 'I'")["n_bytes"] == 2 * 8 * MODEL.d_model * 4).all()
    assert (halves.query("kind == 'W'")["n_bytes"] == 0).all()


def test_the_budget_of_an_emulated_step_adds_up_to_all_ranks_time(runs):
    for run in runs.values():
        budget = run.timeline.budget()
        assert budget.sum() == pytest.approx(run.spec.n_ranks * run.timeline.makespan_ms)
        assert (budget >= -1e-9).all()


def test_8_ranks_overlap_on_the_cores_there_are(tmp_path):  # measures time
    """Sleeping needs no core: 8 ranks of 10 ms slices take 2·(8 + 8 − 1)·10 ms, not 8 times 160 ms."""
    deep = tp.ModelConfig(8, 8, 2, max_seq_tokens=64)
    run = tp.run(emulated(tmp_path / "run", model=deep, n_ranks=8, slicing="[(1, [1] * 8)]", cost=sleeps(10, 10)))
    assert 297 <= run.timeline.steps["makespan_ms"].min() <= 1.15 * 300
    assert np.median(run.timeline.steps["makespan_ms"]) < 2 * 300


def test_an_emulated_run_can_be_verified_no_more_than_a_dream(tmp_path):
    with pytest.raises(SpecError, match="an emulated run computes nothing"):
        tp.verify(emulated(None, slicing="[(1, [8])]"))
