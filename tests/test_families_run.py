"""Every family that runs, on 2 and 4 real ranks: all gradients equal one process, unsliced; few units hang nothing."""

import pytest
from models import small_model

import terapipe as tp
from terapipe.schedule import FAMILIES
from terapipe.slicing import Slicing

MODEL = small_model(n_layers=8, d_model=16, n_heads=2, max_seq_tokens=32)
WHOLE = "[(1, [24])] * 8"
EQUAL = "[(1, [6] * 4)] * 4"
UNEQUAL = "[(1, [9, 7, 5, 3])] * 4"
RAGGED = "[(1, [11, 8, 5]), (2, [24]), (1, [14, 10]), (1, [3] * 8)]"  # other numbers of slices in every microbatch
SLICINGS = {"any": [WHOLE, EQUAL, UNEQUAL, RAGGED], "equal": [WHOLE, EQUAL, UNEQUAL], "whole": [WHOLE]}
OPTIONS = {"svpp": {"max_in_flight": 24}}
RUNNING = [name for name, family in FAMILIES.items() if family.runs_on_ranks and family.kinds != "F"]


def build(name: str, n_ranks: int, slicing: str, chunks: int | None = None) -> tp.Schedule | None:
    """The schedule, None where the family says that it cannot run this."""
    try:
        return tp.build_schedule(name, n_ranks, Slicing.parse(slicing), chunks, **OPTIONS.get(name, {}))
    except tp.TerapipeError:
        return None


def spec(schedule: tp.Schedule) -> tp.RunSpec:
    return tp.RunSpec(MODEL, schedule.slicing, schedule=schedule, n_ranks=schedule.n_ranks, dtype="float64")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_every_gradient_of_every_family_is_that_of_one_process(n_ranks):
    cases = {
        (name, slicing, chunks): build(name, n_ranks, slicing, chunks)
        for name in RUNNING
        for chunks in ((None, 1, 2) if FAMILIES[name].any_chunks else (None,))
        for slicing in SLICINGS[FAMILIES[name].takes_slices]
    }
    built = {case: schedule for case, schedule in cases.items() if schedule is not None}
    assert {name for name, _, _ in built} == set(RUNNING)
    report = tp.verify([spec(schedule) for schedule in built.values()])
    worst = report.groupby("spec")["max_relative_error"].max()
    wrong = {case: error for case, error in zip(built, worst, strict=True) if not error <= 1e-10}
    assert not wrong
    assert len(built) >= 30


@pytest.mark.timeout(120)
def test_forwards_alone_give_the_loss_of_one_process_keep_nothing_and_train_nothing(tmp_path):
    """Without dropout: an evaluation is of the plain model."""
    model = small_model(n_layers=4, dropout=0.5)
    schedule = tp.build_schedule("forward-only", 2, RAGGED)
    evaluation = tp.RunSpec(model, schedule.slicing, schedule="forward-only", dtype="float64", n_steps=3, seed=3)
    report = tp.verify(evaluation)
    assert report["name"].tolist() == ["loss"]
    assert report["max_relative_error"].max() <= 1e-10
    still = evaluation.replaced(text=_one_byte(tmp_path), n_warmup_steps=0)
    plain = still.replaced(model=small_model(n_layers=4), directory=tmp_path / "plain")
    losses = [run.losses["loss"].tolist() for run in tp.run([plain, still.replaced(directory=tmp_path / "dropout")])]
    assert len({*losses[0], *losses[1]}) == 1  # the same text every step, no update between, and nothing dropped
    with pytest.raises(tp.TerapipeError, match="trains nothing"):
        tp.verify(evaluation, what="parameters")


def _one_byte(folder):
    path = folder / "text.txt"
    path.write_bytes(b"a")
    return path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("slicing", ["[(1, [24])]", "[(1, [13, 11])]", "[(1, [24])] * 2"])
def test_fewer_units_than_ranks_end_in_the_simulated_order(slicing, tmp_path):
    """1 × 1, 1 × 2 and 2 × 1 units on 4 ranks."""
    built = {name: build(name, 4, slicing) for name in RUNNING}
    specs = [
        spec(schedule).replaced(n_steps=1, n_warmup_steps=0, directory=tmp_path / name)
        for name, schedule in built.items()
        if schedule is not None
    ]
    assert len(specs) >= 4
    for each, run in zip(specs, tp.run(specs), strict=True):
        ran = run.timeline.frame.sort_values(["rank", "start_ms"], kind="stable")
        actions = ran["stage"].astype(str) + ran["kind"] + ran["microbatch"].astype(str) + "." + ran["slice"].astype(str)
        planned = [str(action) for order in each.schedules[0].orders for action in order]
        assert actions.tolist() == planned
