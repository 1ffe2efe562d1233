"""`tp.verify` catches every seeded fault of tests/faulty.py, on real ranks, and passes each one's healthy twin.

All faults that show in the gradients share one launch, as do all that show in the parameters.
"""

import os
from functools import cache

import pandas as pd
import pytest
from faulty import ENVIRONMENT, FAULTS, Faulty, FaultyUpdate
from models import small_model

import terapipe as tp
from terapipe.engine.rank import RankRun

# Of a run without fault, and the least that a fault must show. Parameters after several steps are
# looser: Adam divides by the root of tiny second moments.
EXACT = {"gradients": 1e-10, "parameters": 1e-8}
FOUND = {"gradients": 1e-8, "parameters": 1e-6}


def spec_of(fault: type[Faulty]) -> tp.RunSpec:
    """The run that shows a fault, without it."""
    training = issubclass(fault, FaultyUpdate)
    return tp.RunSpec(
        small_model(bias=not training, **fault.changes),
        fault.slicing,
        fault.schedule,
        n_ranks=2,
        n_steps=4,
        n_warmup_steps=0,
        dtype="float64",
        learning_rate=1e-3,
        clip_grad_norm=0.5 if training else None,
    )


@cache
def reports(what: str) -> dict[str, dict[str, pd.Series]]:
    """Fault → errors by name, "healthy" and "faulty"."""
    faults = {name: fault for name, fault in FAULTS.items() if fault.what == what}
    twins = {name: spec_of(fault) for name, fault in faults.items()}
    texts = [twin.to_json() for twin in twins.values()]
    healthy = [twin for index, twin in enumerate(twins.values()) if texts.index(texts[index]) == index]
    places = {spec.to_json(): index for index, spec in enumerate(healthy)}
    report = tp.verify([*healthy, *(twin.replaced(stage=f"faulty:{name}") for name, twin in twins.items())], what=what)
    errors = {index: rows.set_index("name")["max_relative_error"] for index, rows in report.groupby("spec")}
    return {
        name: {"healthy": errors[places[twin.to_json()]], "faulty": errors[len(healthy) + index]}
        for index, (name, twin) in enumerate(twins.items())
    }


def errors_of(name: str, which: str) -> pd.Series:
    return reports(FAULTS[name].what)[name][which]


def test_there_are_at_least_twenty_faults():
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_run_without_the_fault_is_exact(name):
    assert (errors_of(name, "healthy") <= EXACT[FAULTS[name].what]).all()


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_caught(name):
    assert errors_of(name, "faulty").max() > FOUND[FAULTS[name].what]


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.silent])
def test_the_loss_alone_would_not_have_shown_it(name):
    errors = errors_of(name, "faulty")
    assert (errors[errors.index.str.endswith("loss")] <= 1e-12).all()


@pytest.mark.parametrize(
    ("name", "right"),
    [
        # What a fault leaves right shows that the rest is found by comparing, not by a step gone wrong as a whole.
        ("DetachedContext", ["layers.3.feed_forward.down.weight", "layers.3.attention.query.weight", "norm.weight"]),
        ("ContextGradientOfKeysOnly", ["layers.3.attention.key.weight", "layers.3.attention.output.weight"]),
        ("ContextGradientOfValuesOnly", ["layers.3.attention.value.weight", "layers.3.attention.output.weight"]),
        ("GradientOfOtherSlice", ["layers.2.attention.query.weight", "layers.3.attention.key.weight", "norm.weight"]),
        ("HeadLost", ["layers.0.attention.query.weight", "layers.3.feed_forward.up.weight", "layers.3.feed_forward.up.bias"]),
        ("BiasForgotten", ["layers.0.attention.query.weight", "embedding.weight", "layers.3.attention_norm.bias"]),
        ("WeightsOfOneSliceTwice", ["layers.0.attention_norm.bias", "position_embedding.weight", "norm.weight"]),
        ("TiedHalves", ["layers.0.attention.query.weight", "position_embedding.weight", "norm.bias"]),
    ],
)
def test_a_fault_spoils_its_own_gradients_and_leaves_the_ones_before_it_in_the_backward(name, right):
    assert (errors_of(name, "faulty")[right] <= EXACT["gradients"]).all()


def test_faults_live_in_ranks_alone():
    assert ENVIRONMENT not in os.environ
    assert RankRun.run_step.__module__ == "terapipe.engine.rank"
