"""Measured memory: what the engine really saves, storage by storage, against the memory model; gradients stay exact."""

import pandas as pd
import pytest
import torch
from models import VARIANTS, make_inputs, run_whole, small_model, worst_error

import terapipe as tp
from terapipe.config import split_layers
from terapipe.cost.held import HELD_COLUMNS
from terapipe.engine.ledger import Ledger
from terapipe.engine.optimizer import share_parameters
from terapipe.engine.stage import Stage, build_module
from terapipe.errors import SpecError
from terapipe.schedule.orders.registry import FAMILIES

MODELS = VARIANTS | {
    "dense": small_model(),
    "untied": small_model(tied_embedding=False),
    "dropout": small_model(dropout=0.1),
    "rotary": small_model(position="rotary"),
    "as Llama, dropout": small_model(
        n_kv_heads=2, activation="swiglu", norm="rmsnorm", bias=False, position="rotary", tied_embedding=False, dropout=0.1
    ),
}
COST = tp.CallableCost(lambda l, c, b: 1.0 * l, lambda l, c, b: 2.0 * l)
TRAINING = [name for name in FAMILIES if name != "forward-only"]
EQUAL, UNEQUAL = "[(1, [16, 16])] * 3", "[(3, [8, 13, 11]), (1, [20, 12])]"
# Two stages on each of two ranks, as zbv places them; F, I and W, and B beside them.
V_SHAPED = {
    0: "0F0.0 0F0.1 0F0.2 3F0.0 3F0.1 3F0.2 3I0.2 3I0.1 3W0.2 3I0.0 3W0.1 3W0.0 0I0.2 0I0.1 0W0.1 0I0.0 0W0.0 0W0.2",
    1: "1F0.0 1F0.1 1F0.2 2F0.0 2F0.1 2F0.2 2B0.2 2I0.1 2I0.0 1B0.2 1I0.1 1I0.0 2W0.0 2W0.1 1W0.1 1W0.0",
}


def run_watched(model: tp.ModelConfig, schedule: tp.Schedule, dtype: str) -> tuple[pd.DataFrame, dict[str, torch.Tensor]]:
    """A schedule run in this process, each rank with a ledger: what they measured, and all gradients."""
    homes, last = schedule.stage_to_rank, schedule.n_stages - 1
    layers, wide = split_layers(model.n_layers, schedule.n_stages), getattr(torch, dtype)
    modules = [build_module(model, each, 0, wide) for each in layers]
    splits = any(action.kind in "IW" for order in schedule.orders for action in order)
    stages = [Stage(module, at == 0, at == last, model.d_model, wide, splits) for at, module in enumerate(modules)]
    gradients: dict[str, torch.Tensor] = {}
    for rank in range(schedule.n_ranks):
        for name, parameter in share_parameters(m for m, home in zip(modules, homes, strict=True) if home == rank).items():
            parameter.grad = gradients.setdefault(name, torch.zeros_like(parameter))  # shared ones add up in one tensor
    for stage in stages:
        stage.begin_step(make_inputs(model, str(schedule.slicing)))
    ledgers = [
        Ledger(stage for stage, home in zip(stages, homes, strict=True) if home == rank) for rank in range(max(homes) + 1)
    ]
    sent: dict[tuple[int, str, int, int], torch.Tensor] = {}
    left = [list(order) for order in schedule.orders]
    while any(left):
        for rank, order in enumerate(left):
            while order:
                action = order[0]
                direction = 1 if action.kind == "F" else -1
                key = (action.stage, "F" if direction == 1 else "B", action.microbatch, action.slice)
                needs = action.kind != "W" and 0 <= action.stage - direction <= last
                if needs and key not in sent:
                    break
                with ledgers[rank].watching():
                    output = stages[action.stage].run(order.pop(0), sent.pop(key) if needs else None)
                ledgers[rank].record()
                if output is not None:
                    target = action.stage + direction
                    output = output if homes[target] == rank else output.clone()  # a message is a tensor of its own
                    sent[target, key[1], action.microbatch, action.slice] = output
                del output
    tables = [pd.DataFrame(ledger.take_rows(), columns=HELD_COLUMNS).assign(rank=rank) for rank, ledger in enumerate(ledgers)]
    return pd.concat(tables, ignore_index=True), gradients


def assert_model_agrees(model: tp.ModelConfig, schedule: tp.Schedule, dtype: str, within: float) -> None:
    measured, gradients = run_watched(model, schedule, dtype)
    modelled = tp.MemoryModel(model, dtype).held(schedule)
    for name in ("units", "context_bytes", "queue_bytes", "weight_bytes"):
        assert measured[name].tolist() == modelled[name].tolist(), name
    assert (abs(modelled["total_bytes"] / measured["total_bytes"] - 1) <= within).all()
    _, expected = run_whole(model, make_inputs(model, str(schedule.slicing)), getattr(torch, dtype))
    assert worst_error(gradients, expected) < {"float64": 1e-10, "float32": 1e-4}[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
class TestEveryAction:
    """After each action, modelled units, contexts, queues and weights are the measured ones, and all bytes within 0.3 %.

    What is left is the labels: with several sequences, 8 bytes a token of a copy.
    """

    @pytest.mark.parametrize("slicing", [EQUAL, UNEQUAL])
    def test_of_slices_on_two_ranks(self, model, dtype, slicing):
        assert_model_agrees(model, tp.build_schedule("terapipe", 2, slicing), dtype, 0.003)

    def test_of_four_stages_on_two_ranks_with_split_backwards(self, model, dtype):
        schedule = tp.Schedule.from_orders(V_SHAPED, "[(3, [8, 13, 11])]")
        assert_model_agrees(model, schedule, dtype, 0.003)


def build_family(name: str, n_ranks: int) -> tp.Schedule:
    """Eight microbatches of 32 tokens: slices unequal where the family takes any, equal where it takes those."""
    cuts = {"any": "[12, 8, 7, 5]", "equal": "[8] * 4", "whole": "[32]"}
    options = {"max_in_flight": 5} if name == "svpp" else {}
    return tp.build_schedule(name, n_ranks, f"[(1, {cuts[FAMILIES[name].takes_slices]})] * 8", **options)


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("name", TRAINING)
def test_of_every_family_within_a_thousandth(name, n_ranks):
    assert_model_agrees(small_model(n_layers=2 * n_ranks), build_family(name, n_ranks), "float32", 0.001)


def test_a_step_ends_with_the_weights_alone():
    measured, _ = run_watched(small_model(dropout=0.1), tp.Schedule.from_orders(V_SHAPED, "[(1, [8, 13, 11])]"), "float32")
    for _, rows in measured.groupby("rank"):
        assert rows.iloc[-1][["units", "activation_bytes", "context_bytes", "queue_bytes"]].tolist() == [0, 0, 0, 0]


def test_a_saved_tensor_that_is_shared_counts_once():
    stage = Stage(torch.nn.Identity(), True, True, 4, torch.float32)
    stage.begin_step(make_inputs(small_model(), "[(1, [4])]"))
    ledger = Ledger([stage])
    tensor = torch.ones(8, requires_grad=True)
    with ledger.watching():
        doubled = tensor * 2
        product = (doubled * doubled) * doubled[:3].sum()  # saves `doubled` and views of it, its square and the sum
    ledger.record()
    assert ledger.take_rows()[0][1] == 8 * 4 + 8 * 4 + 4
    product.sum().backward()
    ledger.record()
    assert ledger.take_rows()[0][1] == 0
    # y = Σ (2x)² · S, S = Σ of the first three 2x; at x = 1: dy/dx = 8·S, and 2·Σ(2x)² more for those three.
    assert tensor.grad.tolist() == [48.0 + 64.0] * 3 + [48.0] * 5


class TestRuns:
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("n_ranks", [2, 4])
    def test_every_family_on_real_ranks_peaks_where_it_is_simulated(self, tmp_path, n_ranks):
        model, names = small_model(n_layers=2 * n_ranks), [name for name in TRAINING if FAMILIES[name].runs_on_ranks]
        schedules = [build_family(name, n_ranks) for name in names]
        values = {"n_ranks": n_ranks, "n_steps": 1, "n_warmup_steps": 0, "measure_memory": True}
        runs = tp.run([tp.RunSpec(model, each.slicing, each, directory=tmp_path / each.name, **values) for each in schedules])
        for schedule, run in zip(schedules, runs, strict=True):
            simulated, measured = tp.simulate(schedule, COST, memory=tp.MemoryModel(model)), tp.load_run(run.directory).timeline
            assert measured.peak_bytes().to_numpy() == pytest.approx(simulated.peak_bytes().to_numpy(), rel=0.001)
            units = measured.memory.groupby("rank")["units"].max().tolist()
            assert units == simulated.peak_in_flight().tolist() == measured.peak_in_flight().tolist()
            assert sorted(measured.memory["step"].unique()) == [0]
            assert len(measured.memory) == len(measured.frame)
            assert list(measured.memory) == list(simulated.memory)

    @pytest.mark.timeout(180)
    def test_gradients_are_exact_while_memory_is_measured(self):
        model = small_model(dropout=0.1)
        schedules = [build_family(name, 2) for name in ("terapipe", "seq1f1b-zb", "zbv")]
        specs = [tp.RunSpec(model, each.slicing, each, dtype="float64", measure_memory=True) for each in schedules]
        assert tp.verify(specs)["max_relative_error"].max() < 1e-10

    def test_a_spec_keeps_the_wish_and_refuses_what_cannot_be_measured(self):
        spec = tp.RunSpec(small_model(), EQUAL, measure_memory=True)
        assert tp.RunSpec.from_json(spec.to_json()).measure_memory
        assert not tp.RunSpec(small_model(), EQUAL).measure_memory
        with pytest.raises(SpecError, match="measure_memory=True on emulated ranks"):
            tp.RunSpec(small_model(), EQUAL, device="emulated", cost=COST, measure_memory=True)
        with pytest.raises(SpecError, match="measure_memory='yes': needs True or False"):
            tp.RunSpec(small_model(), EQUAL, measure_memory="yes")
