"""The memory model against the published formula, the engine's own parameters, and peaks counted by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, slicings

import terapipe as tp
from terapipe.engine.stage import build_module
from terapipe.errors import CostError

MODEL = tp.ModelConfig(2, 64, 4)


@pytest.mark.parametrize("d_model", [64, 6144])
def test_a_token_of_a_dense_layer_takes_34_bytes_a_feature_at_half_precision(d_model):  # arXiv 2205.05198, eq. (2)
    memory = tp.MemoryModel(tp.ModelConfig(2, d_model, 4, dropout=0.1), "float16")
    keys_and_values = memory.context_bytes_per_token / 2  # the other half are their gradients
    assert memory.activation_bytes_per_token + keys_and_values == 34 * d_model


def test_bytes_go_with_the_dtype_and_the_layers_of_a_stage():
    half, single = tp.MemoryModel(MODEL, "bfloat16"), tp.MemoryModel(MODEL)
    deep = tp.MemoryModel(MODEL, n_layers=3)
    for name in ("activation_bytes_per_token", "context_bytes_per_token", "weight_bytes"):
        assert getattr(single, name) == 2 * getattr(half, name)
        assert getattr(deep, name) == 3 * getattr(single, name)


@pytest.mark.parametrize(
    "model",
    [
        tp.ModelConfig(3, 24, 4, vocab_size=7),
        tp.ModelConfig(3, 24, 4, 2, d_ff=20, bias=False),
        tp.ModelConfig(3, 24, 4, 1, activation="swiglu", norm="rmsnorm"),
        tp.ModelConfig(3, 24, 4, activation="swiglu", norm="rmsnorm", bias=False, position="rotary"),
    ],
)
def test_weights_are_the_parameters_of_the_engines_layers(model):
    module = build_module(model, range(1, 3), 0, torch.float32)
    n_parameters = sum(parameter.numel() for name, parameter in module.named_parameters() if name.startswith("layers."))
    assert tp.MemoryModel(model, n_layers=2).weight_bytes == 4 * n_parameters


def test_peaks_counted_by_hand():
    memory = tp.MemoryModel(MODEL)
    unit, context = memory.activation_bytes_per_token, memory.context_bytes_per_token
    schedule = tp.build_schedule("seq1f1b", 2, "[(1, [2, 1])] * 3")
    # Rank 0 holds both slices of microbatch 0 and slice 0 of 1 (5 tokens, two microbatches alive); then 0F1.1 after 0B0.1.
    assert memory.peak_bytes(schedule).tolist() == [
        memory.weight_bytes + 5 * unit + 6 * context,
        memory.weight_bytes + 4 * unit + 6 * context,
    ]


def test_activations_of_a_split_backward_stay_until_its_w_and_keys_and_values_until_its_i():
    memory = tp.MemoryModel(MODEL)
    unit, context = memory.activation_bytes_per_token, memory.context_bytes_per_token
    late = tp.Schedule.from_orders({0: "0F0 0I0 0F1 0I1 0W0 0W1"}, "[(2, [3])] * 2")
    soon = tp.Schedule.from_orders({0: "0F0 0I0 0W0 0F1 0I1 0W1"}, "[(2, [3])] * 2")
    assert memory.peak_bytes(late)[0] == memory.weight_bytes + 12 * unit + 6 * context
    assert memory.peak_bytes(soon)[0] == memory.weight_bytes + 6 * unit + 6 * context


@given(slicings(max_tokens=12, max_microbatches=4, max_slices=4), st.integers(1, 4))
@PROPERTY
def test_terapipe_ends_its_forwards_with_everything_in_memory(slicing, n_ranks):
    memory = tp.MemoryModel(MODEL)
    per_token = memory.activation_bytes_per_token + memory.context_bytes_per_token
    peaks = memory.peak_bytes(tp.build_schedule("terapipe", n_ranks, slicing))
    assert peaks.tolist() == [memory.weight_bytes + slicing.n_tokens * per_token] * n_ranks
    assert peaks.index.name == "rank"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: tp.MemoryModel("tour"), "model='tour'.*ModelConfig.preset"),
        (lambda: tp.MemoryModel(MODEL, "float23"), "unknown dtype 'float23'. Did you mean 'float32'"),
        (lambda: tp.MemoryModel(MODEL, n_layers=0), "n_layers=0: needs an integer of at least 1"),
    ],
)
def test_it_refuses(wrong, said):
    with pytest.raises(CostError, match=said):
        wrong()
