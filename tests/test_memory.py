"""The memory model against the published formula, the engine's own parameters, and states counted by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, schedules, slicings

import terapipe as tp
from terapipe.config import split_layers
from terapipe.engine.optimizer import share_parameters
from terapipe.engine.stage import build_module
from terapipe.errors import CostError, TimelineError
from terapipe.search.replay import Replay

MODEL = tp.ModelConfig(2, 64, 4)
COST = tp.CallableCost(lambda l, c, b: 1.0 * l, lambda l, c, b: 2.0 * l)
LINE = (0, 1, 2)  # three stages: the first, one between, the last


@pytest.mark.parametrize("d_model", [64, 6144])
def test_a_token_of_a_dense_layer_takes_34_bytes_a_feature_at_half_precision(d_model):  # arXiv 2205.05198, eq. (2)
    model = tp.ModelConfig(3, d_model, 4, dropout=0.1)
    stage = tp.MemoryModel(model, "float16", n_layers=1).stages(LINE)[1]
    keys_values_and_gradients = 4 * d_model * 2
    masks = stage.context_bytes_per_token - keys_values_and_gradients
    smaller = 2 * 2 * 2 + 4 * 4  # neglected there: two statistics of two norms, and a float32 a head
    output = 2 * d_model  # of the stage, not of the layer
    assert stage.activation_bytes_per_token - smaller - output + keys_values_and_gradients / 2 + masks == 34 * d_model


def test_bytes_go_with_the_dtype_and_the_layers_of_a_stage():
    half, single = tp.MemoryModel(MODEL, "bfloat16", 1).stages(LINE)[1], tp.MemoryModel(MODEL, n_layers=1).stages(LINE)[1]
    deep = tp.MemoryModel(MODEL, n_layers=3).stages(LINE)[1]
    for name in ("queue_bytes_per_token", "context_bytes_per_token", "weight_bytes"):
        assert getattr(single, name) == 2 * getattr(half, name)
        assert getattr(deep, name) == 3 * getattr(single, name)
    output = 64 * 4
    assert deep.activation_bytes_per_token - output == 3 * (single.activation_bytes_per_token - output)


def test_layers_are_divided_as_a_run_divides_them():
    model = tp.ModelConfig(7, 32, 4, vocab_size=11, max_seq_tokens=9)
    spec = tp.RunSpec(model, "[(1, [8])] * 3", n_ranks=3)
    memory = tp.MemoryModel(model)
    assert memory.stages(LINE) == tp.MemoryModel(model, n_layers=[len(layers) for layers in spec.layer_ranges]).stages(LINE)
    with pytest.raises(CostError, match=r"8 stages for 7 layers.*n_layers="):
        memory.stages(range(8))
    with pytest.raises(CostError, match=r"n_layers=\[3, 4\] names 2 stages; the schedule has 3"):
        tp.MemoryModel(model, n_layers=[3, 4]).stages(LINE)


@pytest.mark.parametrize("homes", [(0,), (0, 1, 2), (0, 1, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize(
    "model",
    [
        tp.ModelConfig(5, 24, 4, vocab_size=7),
        tp.ModelConfig(5, 24, 4, 2, d_ff=20, bias=False, tied_embedding=False),
        tp.ModelConfig(5, 24, 4, 1, activation="swiglu", norm="rmsnorm"),
        tp.ModelConfig(5, 24, 4, activation="swiglu", norm="rmsnorm", bias=False, position="rotary"),
    ],
)
def test_weights_of_a_rank_are_the_parameters_of_its_stages_a_tied_one_once(model, homes):
    modules = [build_module(model, layers, 0, torch.float32) for layers in split_layers(5, len(homes))]
    for rank, n_bytes in enumerate(tp.MemoryModel(model).rank_weight_bytes(homes)):
        held = share_parameters(module for module, home in zip(modules, homes, strict=True) if home == rank)
        assert n_bytes == sum(parameter.nbytes for parameter in held.values())


def test_peaks_counted_by_hand():
    memory = tp.MemoryModel(MODEL)
    first, last = memory.stages((0, 1))
    schedule = tp.build_schedule("seq1f1b", 2, "[(1, [2, 1])] * 3")
    # Rank 0 holds both slices of microbatch 0 and slice 0 of 1 (5 tokens, two microbatches alive); then 0F1.1 after 0B0.1.
    assert memory.peak_bytes(schedule).tolist() == [
        first.weight_bytes + 5 * (first.activation_bytes_per_token + 8) + 6 * first.context_bytes_per_token,
        last.weight_bytes + 4 * last.activation_bytes_per_token + 6 * last.context_bytes_per_token,
    ]
    assert first.activation_bytes_per_position == 8  # the position that the embedding looked up


def test_a_split_backward_keeps_keys_and_values_until_i_and_its_queue_until_w():
    memory, slicing = tp.MemoryModel(MODEL, n_layers=1), "[(2, [3])] * 2"
    stage = memory.stages((0,))[0]
    late = tp.Schedule.from_orders({0: "0F0 0I0 0F1 0I1 0W0 0W1"}, slicing)
    unit, context = 6 * stage.activation_bytes_per_token + 3 * 8, 6 * stage.context_bytes_per_token
    queue = 6 * stage.queue_bytes_per_token
    held = memory.held(late)
    assert held["units"].tolist() == [1, 1, 2, 2, 1, 0]
    assert held["activation_bytes"].tolist() == [unit, 0, unit, 0, 0, 0]
    assert held["context_bytes"].tolist() == [context, 0, context, 0, 0, 0]
    assert held["queue_bytes"].tolist() == [0, queue, queue, 2 * queue, queue, 0]
    assert set(held["weight_bytes"]) == {stage.weight_bytes}
    assert (held["total_bytes"] == held.filter(like="_bytes").drop(columns="total_bytes").sum(axis=1)).all()


@given(slicings(max_tokens=12, max_microbatches=4, max_slices=4), st.integers(1, 4))
@PROPERTY
def test_terapipe_ends_its_forwards_with_everything_in_memory(slicing, n_ranks):
    memory = tp.MemoryModel(MODEL, n_layers=1)
    n_positions = sum(sum(each.slice_tokens) for each in slicing.microbatches)
    peaks = memory.peak_bytes(tp.build_schedule("terapipe", n_ranks, slicing))
    assert peaks.tolist() == [
        stage.weight_bytes
        + slicing.n_tokens * (stage.activation_bytes_per_token + stage.context_bytes_per_token)
        + n_positions * stage.activation_bytes_per_position
        for stage in memory.stages(range(n_ranks))
    ]
    assert peaks.index.name == "rank"


def held_one_by_one(memory: tp.MemoryModel, schedule: tp.Schedule) -> list[int]:
    """Total bytes after each action, rank by rank: what is live is listed anew each time."""
    stages, totals = memory.stages(schedule.stage_to_rank), []
    weights = memory.rank_weight_bytes(schedule.stage_to_rank)
    for rank, order in enumerate(schedule.orders):
        for n_done in range(1, len(order) + 1):
            done = {(action.stage, str(action.kind), action.microbatch, action.slice) for action in order[:n_done]}
            total = weights[rank]
            for index, kind, microbatch, place in done:
                stage, each = stages[index], schedule.slicing.microbatches[microbatch]
                tokens = each.slice_tokens[place] * each.n_sequences
                went_back = any((index, back, microbatch, place) in done for back in "BI")
                if kind == "F" and not went_back:
                    total += tokens * stage.activation_bytes_per_token
                    total += each.slice_tokens[place] * stage.activation_bytes_per_position
                if kind == "I" and (index, "W", microbatch, place) not in done:
                    total += tokens * stage.queue_bytes_per_token
                if kind == "F" and place == 0 and not went_back:  # a microbatch is alive from its first F to its last B
                    total += schedule.slicing.seq_tokens * each.n_sequences * stage.context_bytes_per_token
            totals.append(total)
    return totals


@given(schedules())
@PROPERTY
def test_any_schedule_holds_what_is_alive(drawn):
    orders, slicing = drawn
    schedule = tp.Schedule.from_orders(dict(enumerate(orders)), slicing)
    memory = tp.MemoryModel(tp.ModelConfig(2, 8, 2, vocab_size=5, position="rotary", dropout=0.1), n_layers=2)
    assert memory.held(schedule)["total_bytes"].tolist() == held_one_by_one(memory, schedule)
    timeline = tp.simulate(schedule, COST, memory=memory)
    assert timeline.peak_bytes().tolist() == memory.peak_bytes(schedule).tolist()
    assert timeline.memory.groupby("rank")["units"].max().tolist() == timeline.peak_in_flight().tolist()
    assert np.array_equal(timeline.memory["time_ms"], timeline.frame["end_ms"])


@pytest.mark.parametrize("family", ["terapipe", "seq1f1b", "seq1f1b-zb"])
def test_a_search_sees_the_same_peaks_where_stages_differ(family):
    memory = tp.MemoryModel(tp.ModelConfig(7, 32, 4, dropout=0.1, position="rotary"))
    lengths = np.random.default_rng(0).integers(1, 9, size=(4, 3))
    found = Replay(family, 3, 4, 3).peak_bytes(memory, lengths)
    for row, peak in zip(lengths.tolist(), found, strict=True):
        assert peak == memory.peak_bytes(tp.build_schedule(family, 3, f"[(1, {row})] * 4")).max()


class TestTimeline:
    SCHEDULE = tp.build_schedule("seq1f1b", 2, "[(1, [2, 1])] * 3")

    def test_without_a_memory_model_units_are_there_and_bytes_unknown(self):
        timeline = tp.simulate(self.SCHEDULE, COST)
        assert timeline.memory.groupby("rank")["units"].max().tolist() == timeline.peak_in_flight().tolist() == [3, 2]
        assert timeline.memory.filter(like="_bytes").isna().all(axis=None)
        assert list(timeline.memory) == list(tp.simulate(self.SCHEDULE, COST, memory=tp.MemoryModel(MODEL)).memory)
        with pytest.raises(TimelineError, match=r"units, not bytes.*memory=MemoryModel.*measure_memory=True"):
            timeline.peak_bytes()

    def test_a_table_read_back_counts_units_too(self):
        frame = tp.simulate(self.SCHEDULE, COST).frame
        assert tp.Timeline.from_frame(pd.DataFrame(frame)).memory["units"].max() == 3

    def test_the_table_is_made_when_it_is_looked_at(self, monkeypatch):
        calls = []
        monkeypatch.setattr(tp.MemoryModel, "held", lambda self, schedule: calls.append(1))
        tp.simulate(self.SCHEDULE, COST, memory=tp.MemoryModel(MODEL)).frame  # noqa: B018
        assert calls == []

    def test_a_model_that_does_not_fit_is_refused_at_once(self):
        with pytest.raises(CostError, match="3 stages for 2 layers"):
            tp.simulate(tp.build_schedule("terapipe", 3, "[(1, [2])]"), COST, memory=tp.MemoryModel(MODEL))
        with pytest.raises(CostError, match="memory=12: needs a MemoryModel"):
            tp.simulate(self.SCHEDULE, COST, memory=12)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: tp.MemoryModel("tour"), "model='tour'.*ModelConfig.preset"),
        (lambda: tp.MemoryModel(MODEL, "float23"), "unknown dtype 'float23'. Did you mean 'float32'"),
        (lambda: tp.MemoryModel(MODEL, n_layers=0), "n_layers=0: needs an integer of at least 1"),
        (lambda: tp.MemoryModel(MODEL, n_layers=[1, 0]), r"n_layers\[1\]=0: needs an integer of at least 1"),
        (lambda: tp.MemoryModel(MODEL, n_layers="all"), "n_layers='all': needs an integer of at least 1"),
    ],
)
def test_it_refuses(wrong, said):
    with pytest.raises(CostError, match=said):
        wrong()
