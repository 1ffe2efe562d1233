"""ModelConfig refuses what cannot be built; split_layers gives every layer to exactly one stage."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, replace
from importlib import resources

import pytest

import terapipe as tp
from terapipe.config import split_layers
from terapipe.errors import ConfigError, TerapipeError

SMALL = {"n_layers": 2, "d_model": 8, "n_heads": 4}

# TeraPipe (2102.07988), Table 1: layers, width, heads of the four models.
PAPER_MODELS = {
    "gpt3-1b": (24, 2048, 16),
    "gpt3-13b": (40, 5120, 40),
    "gpt3-44b": (96, 6144, 48),
    "gpt3-175b": (96, 12288, 96),
}


def presets() -> dict[str, dict[str, object]]:
    return json.loads(resources.files("terapipe").joinpath("presets/models.json").read_text("utf-8"))


def test_defaults_are_one_kv_head_a_head_and_4_times_the_width_in_the_feed_forward():
    model = tp.ModelConfig(**SMALL)
    assert (model.n_kv_heads, model.d_ff, model.head_dim, model.kv_heads, model.ff_dim) == (4, 32, 2, 4, 32)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n_layers": 0}, ["n_layers=0", "at least 1"]),
        ({"n_layers": -1}, ["n_layers=-1", "at least 1"]),
        ({"n_layers": 2.0}, ["n_layers=2.0", "integer"]),
        ({"n_layers": True}, ["n_layers=True", "integer"]),
        ({"n_layers": "2"}, ["n_layers='2'", "integer"]),
        ({"d_model": 0}, ["d_model=0"]),
        ({"n_heads": 0}, ["n_heads=0"]),
        ({"n_kv_heads": 0}, ["n_kv_heads=0"]),
        ({"d_ff": 0}, ["d_ff=0"]),
        ({"max_seq_tokens": 0}, ["max_seq_tokens=0"]),
        ({"vocab_size": 1}, ["vocab_size=1", "at least 2"]),
        ({"d_model": 9}, ["d_model=9", "n_heads=4", "d_model=12"]),
        ({"n_kv_heads": 3}, ["n_heads=4", "n_kv_heads=3"]),
        ({"n_heads": 8, "position": "rotary"}, ["rotary", "=1 must be even"]),
        ({"dropout": 1.0}, ["dropout=1.0", "0 ≤ dropout < 1"]),
        ({"dropout": -0.1}, ["dropout=-0.1"]),
        ({"dropout": float("nan")}, ["dropout=nan"]),
        ({"norm_eps": 0.0}, ["norm_eps=0.0", "positive"]),
        ({"rope_theta": -1.0}, ["rope_theta=-1.0", "positive"]),
    ],
)
def test_a_size_that_cannot_be_built_is_refused_quoting_it(wrong, said):
    with pytest.raises(ConfigError) as refusal:
        tp.ModelConfig(**{**SMALL, **wrong})
    assert all(part in str(refusal.value) for part in said), refusal.value
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, TerapipeError)


@pytest.mark.parametrize(("name", "value"), [("dropout", "0.1"), ("norm_eps", None)])
def test_a_number_that_is_no_number_is_refused_quoting_it(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        tp.ModelConfig(**{**SMALL, name: value})


@pytest.mark.parametrize(("name", "value"), [("bias", "no"), ("tied_embedding", None)])
def test_a_flag_that_is_neither_true_nor_false_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        tp.ModelConfig(**{**SMALL, name: value})


@pytest.mark.parametrize(
    ("name", "given", "nearest"),
    [
        ("activation", "gleu", "gelu"),
        ("activation", "swi-glu", "swiglu"),
        ("norm", "rms_norm", "rmsnorm"),
        ("position", "rope", "rotary"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_nearest_one(name, given, nearest):
    with pytest.raises(ConfigError) as refusal:
        tp.ModelConfig(**{**SMALL, name: given})
    assert f"unknown {name} {given!r}" in str(refusal.value)
    assert f"Did you mean {nearest!r}?" in str(refusal.value)


def test_a_model_cannot_be_changed_after_it_was_checked():
    with pytest.raises(FrozenInstanceError):
        tp.ModelConfig(**SMALL).n_layers = 0


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_and_names_its_source(name):
    model = tp.ModelConfig.preset(name)
    stored = presets()[name]
    assert len(str(stored.pop("source"))) > 10
    assert {key: getattr(model, key) for key in stored} == stored


@pytest.mark.parametrize("name", sorted(PAPER_MODELS))
def test_the_papers_models_have_the_sizes_of_its_table_1(name):
    model = tp.ModelConfig.preset(name)
    assert (model.n_layers, model.d_model, model.n_heads) == PAPER_MODELS[name]
    assert model.max_seq_tokens == 2048


def test_an_unknown_preset_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"Did you mean 'gpt3-13b'\?"):
        tp.ModelConfig.preset("gpt-13b")


@pytest.mark.parametrize(
    "model",
    [
        tp.ModelConfig(**SMALL),
        tp.ModelConfig.preset("gpt3-175b"),
        tp.ModelConfig(
            **SMALL, n_kv_heads=2, d_ff=20, vocab_size=2, max_seq_tokens=16, position="rotary", rope_theta=5e5,
            activation="swiglu", norm="rmsnorm", norm_eps=1e-6, bias=False, tied_embedding=False, dropout=0.25,
        ),
    ],
)  # fmt: skip
def test_a_model_comes_back_from_json_unchanged(model):
    assert tp.ModelConfig.from_dict(json.loads(json.dumps(model.to_dict()))) == model


def test_a_model_survives_pickling_copying_and_replacing():
    model = tp.ModelConfig(**SMALL, bias=False)
    assert pickle.loads(pickle.dumps(model)) == copy.deepcopy(model) == replace(model) == model
    with pytest.raises(ConfigError, match="n_heads=3"):
        replace(model, n_heads=3)


def test_unknown_and_missing_keys_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"'n_layer'. Did you mean 'n_layers'\?"):
        tp.ModelConfig.from_dict({**SMALL, "n_layer": 2})
    with pytest.raises(ConfigError, match=r"'n_layer'. Did you mean 'n_layers'\?"):
        tp.ModelConfig.from_dict({"n_layer": 2, "d_model": 8, "n_heads": 4})
    with pytest.raises(ConfigError, match=r"'n_head'. Did you mean 'n_heads'\?"):
        tp.ModelConfig(**SMALL, n_head=4)
    with pytest.raises(ConfigError, match="needs n_heads; given: n_layers, d_model"):
        tp.ModelConfig.from_dict({"n_layers": 2, "d_model": 8})
    with pytest.raises(ConfigError, match="given: nothing"):
        tp.ModelConfig.from_dict({})


def test_30_layers_over_4_stages_are_layers_0_to_29_once_each():  # S11
    ranges = split_layers(30, 4)
    assert [len(layers) for layers in ranges] == [8, 8, 7, 7]
    assert [layer for layers in ranges for layer in layers] == list(range(30))


def test_every_split_covers_every_layer_once_with_lengths_that_differ_by_at_most_1():
    for n_layers in range(1, 33):
        for n_stages in range(1, n_layers + 1):
            ranges = split_layers(n_layers, n_stages)
            lengths = [len(layers) for layers in ranges]
            assert [layer for layers in ranges for layer in layers] == list(range(n_layers))
            assert len(ranges) == n_stages
            assert max(lengths) - min(lengths) <= 1
            assert lengths == sorted(lengths, reverse=True)


def test_counts_given_by_hand_are_kept():
    assert split_layers(6, 3, [1, 3, 2]) == [range(0, 1), range(1, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((2, 3), ["3 stages", "2 layers"]),  # S6
        ((4, 0), ["n_stages=0"]),
        ((30, 4, [7, 7, 7, 7]), ["[7, 7, 7, 7]", "28", "30", "drop 2"]),  # S11
        ((30, 4, [8, 8, 8, 8]), ["32", "30", "repeat 2"]),
        ((4, 2, [4, 0]), ["[4, 0]", "at least one"]),
        ((4, 2, [5, -1]), ["[5, -1]", "at least one"]),
        ((4, 2, [1, 1, 2]), ["3 stages", "there are 2"]),
        ((4, 2, []), ["0 stages", "there are 2"]),
    ],
)
def test_a_split_that_drops_repeats_or_starves_is_refused_with_both_numbers(arguments, said):
    with pytest.raises(ConfigError) as refusal:
        split_layers(*arguments)
    assert all(part in str(refusal.value) for part in said), refusal.value
