"""Runs on real ranks are exact: every gradient and the loss equal one process, unsliced and unpipelined.

All specs with the same number of ranks share one launch, made by the first test that asks for one
of them.
"""

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from models import VARIANTS, run_whole, small_model, worst_error
from reference import inputs
from sliding_window import SlidingWindowStage

import terapipe as tp
from terapipe.engine import verify as verify_module
from terapipe.engine.rank import step_inputs
from terapipe.engine.reference import build_reference, reference_step
from terapipe.errors import RunError, ScheduleError, SpecError

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
SLIDING_WINDOW = "sliding_window:SlidingWindowStage"

# Name → family and slicing, of sequences of 12 tokens.
PLANS = {
    "whole": ("terapipe", "[(1, [12])] * 3"),
    "uniform": ("terapipe", "[(1, [4, 4, 4])] * 2"),
    "uneven": ("terapipe", "[(1, [7, 1, 4])] * 2"),
    "five slices": ("terapipe", "[(2, [1, 4, 2, 3, 2])]"),
    "different slices": ("terapipe", "[(1, [12]), (1, [5, 7]), (1, [1] * 12)]"),
    "1 and 2 sequences": ("terapipe", "[(1, [6, 6]), (2, [7, 1, 4]), (1, [12])]"),
    "gpipe": ("gpipe", "[(2, [12])] * 3"),
    "1f1b": ("1f1b", "[(1, [12])] * 5"),
    "seq1f1b": ("seq1f1b", "[(1, [5, 4, 3])] * 3 + [(2, [7, 5])]"),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "n_ranks": (1, 2, 3, 4),
    "plan": tuple(PLANS),
    "dtype": ("float64", "float32"),
    "tied_embedding": (True, False),
    "position": ("learned", "rotary"),
    "dropout": (0.0, 0.1),
}

Row = dict[str, Any]


def full_product(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairs_of(row: Row) -> set[tuple[tuple[str, Any], ...]]:
    """Each two factors of a row with their values."""
    return set(itertools.combinations(row.items(), 2))


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Few rows in which every two values of different factors meet: greedily, the row with most new pairs next."""
    rows = [(row, pairs_of(row)) for row in full_product(factors)]
    missing = set().union(*(pairs for _, pairs in rows))
    chosen = []
    while missing:
        row, pairs = max(rows, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(row)
        missing -= pairs
    return chosen


def spec_of(row: Row) -> tp.RunSpec:
    schedule, slicing = PLANS[row["plan"]]
    model = small_model(**{name: row[name] for name in ("tied_embedding", "position", "dropout")})
    return tp.RunSpec(model, slicing, schedule, n_ranks=row["n_ranks"], dtype=row["dtype"])


def describe(row: Row) -> str:
    tied, dropout = "tied" if row["tied_embedding"] else "untied", f"dropout {row['dropout']:g}"
    return ", ".join([f"{row['n_ranks']} ranks", row["plan"], row["dtype"], tied, row["position"], dropout])


def typed(slicing: str, *orders: str, chunks_per_rank: int = 1, **changes: Any) -> tp.RunSpec:
    """A run of a schedule typed by hand, one line a rank."""
    schedule = tp.Schedule.from_orders(dict(enumerate(orders)), slicing)
    model = small_model(**changes)
    return tp.RunSpec(model, slicing, schedule, len(orders), chunks_per_rank, dtype="float64")


def sliding_window(slicing: str, position: str = "learned") -> tp.RunSpec:
    model = small_model(position=position, n_kv_heads=2)
    return tp.RunSpec(model, slicing, n_ranks=2, dtype="float64", stage=SLIDING_WINDOW)


def random_schedule(n_ranks: int, chunks_per_rank: int, seed: int) -> tp.RunSpec:
    """Stages on random ranks, actions in any order in which each comes after what it needs."""
    rng = random.Random(seed)
    slicing = rng.choice([PLANS[plan][1] for plan in ("uniform", "uneven", "five slices", "different slices")])
    cut = tp.Slicing.parse(slicing)
    homes = [rank for rank in range(n_ranks) for _ in range(chunks_per_rank)]
    rng.shuffle(homes)
    units = [(microbatch, place) for microbatch, each in enumerate(cut.microbatches) for place in range(each.n_slices)]
    actions = {f"{g}{kind}{m}.{s}" for g in range(len(homes)) for kind in "FB" for m, s in units}
    needs = {text: {need for need in inputs(text) if need in actions} for text in sorted(actions)}
    orders: dict[int, list[str]] = {rank: [] for rank in range(n_ranks)}
    done: set[str] = set()
    while needs:
        text = rng.choice([text for text, need in needs.items() if need <= done])
        del needs[text]
        done.add(text)
        orders[homes[int(text[0])]].append(text)
    schedule = tp.Schedule.from_orders(orders, cut)
    model = small_model(tied_embedding=rng.random() < 0.5, dropout=0.1)
    return tp.RunSpec(model, cut, schedule, n_ranks, chunks_per_rank, dtype="float64")


def more_cases() -> dict[str, tp.RunSpec]:
    """Beyond the product: kinds of model, cuts, placements, orders, lengths."""
    uneven = "[(1, [7, 1, 4]), (2, [6, 6])]"
    cases = {
        f"{name}, {dtype}": tp.RunSpec(model, uneven, n_ranks=2, dtype=dtype)
        for name, model in VARIANTS.items()
        for dtype in ("float64", "float32")
    }
    for counts in ([1, 3], [3, 1], [1, 2, 1], [2, 1, 1]):
        cases[f"layers {counts}"] = tp.RunSpec(
            small_model(), uneven, n_ranks=len(counts), layers_per_stage=counts, dtype="float64"
        )
    for n_ranks, n_layers in ((2, 5), (3, 7), (4, 6)):
        cases[f"{n_layers} layers over {n_ranks} ranks"] = tp.RunSpec(
            small_model(n_layers=n_layers), uneven, n_ranks=n_ranks, dtype="float64"
        )
    for n_ranks in (2, 3):  # S10: shapes follow each step's slicing, not the first one's
        cases[f"steps of 12, 13 and 7 tokens on {n_ranks} ranks"] = tp.RunSpec(
            small_model(dropout=0.1), ["[(1, [7, 5])] * 2", "[(2, [13])]", "[(1, [3, 1, 3])]"], n_ranks=n_ranks, dtype="float64"
        )
    cases["fewer slices than ranks"] = tp.RunSpec(small_model(), "[(1, [12])]", n_ranks=4, dtype="float64")  # S7
    cases["1f1b of one microbatch on 4 ranks"] = tp.RunSpec(small_model(), "[(1, [12])]", "1f1b", n_ranks=4, dtype="float64")
    cases["sequences of one token"] = tp.RunSpec(small_model(), "[(2, [1])] * 2", n_ranks=2, dtype="float64")  # S22
    cases["10 tokens in 3 slices, 8 sequences in 3 microbatches"] = tp.RunSpec(
        small_model(), "[(3, [4, 3, 3]), (3, [4, 3, 3]), (2, [4, 3, 3])]", n_ranks=3, dtype="float64"
    )  # S9
    cases["a text of your own"] = tp.RunSpec(small_model(), uneven, n_ranks=2, dtype="float64", text=__file__)
    for plan in ("whole", "uniform", "five slices", "1 and 2 sequences"):
        for position in ("learned", "rotary"):
            cases[f"sliding window, {plan}, {position}"] = sliding_window(PLANS[plan][1], position)
    return cases | typed_cases()


def typed_cases() -> dict[str, tp.RunSpec]:
    alternating = (
        "0F0.0 0F1.0 0F0.1 0F1.1 0F0.2 0B1.1 0B0.2 0B1.0 0B0.1 0B0.0",
        "1F1.0 1F0.0 1F1.1 1B1.1 1F0.1 1F0.2 1B0.2 1B0.1 1B1.0 1B0.0",  # receives in another order than rank 0 sends
    )
    in_turn = (
        "0F0.0 0F0.1 0B0.1 0F1.0 0B0.0 0F1.1 0B1.1 0F2.0 0B1.0 0B2.0",
        "1F0.0 1F0.1 1B0.1 1B0.0 1F1.0 1F1.1 1B1.1 1B1.0 1F2.0 1B2.0",
    )
    v_shaped = (
        "0F0.0 0F0.1 0F1.0 0F1.1 3F0.0 3F0.1 3B0.1 3B0.0 3F1.0 3F1.1 3B1.1 3B1.0 0B0.1 0B0.0 0B1.1 0B1.0",
        "1F0.0 2F0.0 1F0.1 2F0.1 1F1.0 2F1.0 1F1.1 2F1.1 2B0.1 1B0.1 2B0.0 1B0.0 2B1.1 1B1.1 2B1.0 1B1.0",
    )
    looped = (
        "0F0.0 0F0.1 2F0.0 2F0.1 2B0.1 2B0.0 0B0.1 0B0.0",
        "1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 3B0.0 1B0.1 1B0.0",
    )
    one_rank = "0F0.0 1F0.0 0F0.1 0F0.2 1F0.1 1F0.2 1B0.2 0B0.2 1B0.1 1B0.0 0B0.1 0B0.0"
    four_here = " ".join(f"{stage}F0.{place}" for place in (0, 1) for stage in range(4))
    four_back = " ".join(f"{stage}B0.{place}" for place in (1, 0) for stage in (3, 2, 1, 0))
    cases = {
        "typed: microbatches alternating": typed("[(1, [5, 4, 3]), (1, [6, 6])]", *alternating),
        "typed: forward and backward in turn": typed("[(1, [7, 5]), (2, [3, 9]), (1, [12])]", *in_turn, dropout=0.1),
        "typed: two stages on one rank": typed("[(2, [7, 1, 4])]", one_rank, chunks_per_rank=2),
        "typed: four stages on one rank": typed("[(1, [7, 5])]", f"{four_here} {four_back}", chunks_per_rank=4),
    }
    for tied in (True, False):
        cases[f"typed: V-shaped, {'tied' if tied else 'untied'}"] = typed(
            "[(1, [7, 5])] * 2", *v_shaped, chunks_per_rank=2, tied_embedding=tied
        )
        cases[f"typed: looped, {'tied' if tied else 'untied'}"] = typed(
            "[(1, [7, 5])]", *looped, chunks_per_rank=2, tied_embedding=tied
        )
    for n_ranks, chunks in ((2, 1), (2, 2), (3, 1), (4, 1)):
        for seed in range(4):
            cases[f"random order {seed}: {n_ranks * chunks} stages on {n_ranks} ranks"] = random_schedule(n_ranks, chunks, seed)
    return cases


CASES = {describe(row): spec_of(row) for row in all_pairs(FACTORS)} | more_cases()


@cache
def verified(n_ranks: int) -> dict[str, pd.DataFrame]:
    """One launch: the report of every case of `CASES` with that many ranks."""
    names = [name for name, spec in CASES.items() if spec.n_ranks == n_ranks]
    return split_report(names, [CASES[name] for name in names])


def split_report(names: Sequence[str], specs: Sequence[tp.RunSpec]) -> dict[str, pd.DataFrame]:
    report = tp.verify(specs)
    assert report.attrs["tolerance"] == [TOLERANCE[spec.dtype] for spec in specs]
    return {name: report[report["spec"] == index] for index, name in enumerate(names)}


def assert_exact(spec: tp.RunSpec, report: pd.DataFrame) -> None:
    """Every gradient by name, on every rank that holds it, and the loss; nothing left out."""
    expected = [name for name, _ in build_reference(spec).named_parameters()] + ["loss"]
    if len(spec.slicings) > 1:
        expected = [f"step {step}: {name}" for step in range(len(spec.slicings)) for name in expected]
    assert set(report["name"]) == set(expected)
    errors = report.set_index("name")["max_relative_error"]
    wrong = errors[~(errors <= TOLERANCE[spec.dtype])]  # not "greater": nothing is greater than NaN
    assert wrong.empty, f"\n{wrong}"


class TestAllPairs:
    def test_three_factors_of_two_values_need_4_rows_not_8(self):
        rows = all_pairs({"a": (0, 1), "b": (0, 1), "c": (0, 1)})
        assert sorted(tuple(row.values()) for row in rows) == [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]

    def test_every_two_values_of_different_factors_meet_in_the_default_run(self):
        met = [(row[a], row[b], a, b) for row in all_pairs(FACTORS) for a, b in itertools.combinations(FACTORS, 2)]
        for a, b in itertools.combinations(FACTORS, 2):
            for value, other in itertools.product(FACTORS[a], FACTORS[b]):
                assert (value, other, a, b) in met

    def test_it_takes_at_most_44_rows_of_576(self):
        # At least 36: each of 4 numbers of ranks meets each of 9 plans.
        assert len(full_product(FACTORS)) == 576
        assert 36 <= len(all_pairs(FACTORS)) <= 44


class TestGradients:
    @pytest.mark.parametrize("name", CASES)
    def test_every_gradient_and_the_loss_equal_one_process(self, name):
        assert_exact(CASES[name], verified(CASES[name].n_ranks)[name])

    @pytest.mark.full
    @pytest.mark.parametrize("n_ranks", FACTORS["n_ranks"])
    def test_full_product_equals_one_process(self, n_ranks):
        rows = [row for row in full_product(FACTORS) if row["n_ranks"] == n_ranks]
        assert len(rows) == 128
        specs = [spec_of(row) for row in rows]
        reports = split_report([describe(row) for row in rows], specs)
        for spec, report in zip(specs, reports.values(), strict=True):
            assert_exact(spec, report)

    def test_each_copy_of_a_tied_embedding_is_reported(self):
        counts = verified(2)["typed: looped, tied"]["name"].value_counts()
        assert counts["embedding.weight"] == 2
        assert set(counts.drop("embedding.weight")) == {1}

    @pytest.mark.parametrize(("schedule", "nearest"), [("gpipe", "terapipe"), ("1f1b", "seq1f1b")])
    def test_families_of_whole_microbatches_given_slices_refuse_and_name_the_nearest_that_takes_them(self, schedule, nearest):
        with pytest.raises(ScheduleError, match=rf"{schedule} runs whole microbatches.*up to 3 slices.*'{nearest}'"):
            tp.RunSpec(small_model(), "[(1, [12]), (1, [7, 1, 4])]", schedule, n_ranks=2)


class TestReport:
    """What `tp.verify` says of a comparison, on its own files."""

    def test_an_emulated_run_is_refused_as_it_computes_nothing(self):
        cost = tp.CallableCost(lambda l, c, b: 0.0 * l, lambda l, c, b: 0.0 * l)
        with pytest.raises(SpecError, match="emulated run computes nothing"):
            tp.verify(tp.RunSpec(small_model(), "[(1, [12])]", device="emulated", cost=cost))

    def test_what_is_neither_gradients_nor_parameters_is_refused(self):
        with pytest.raises(SpecError, match=r"what='losses'.*'gradients' and 'parameters'"):
            tp.verify(tp.RunSpec(small_model(), "[(1, [12])]"), what="losses")

    def test_a_failed_rank_leaves_the_log_that_the_error_names(self):
        spec = tp.RunSpec(small_model(), "[(1, [12])]", n_ranks=1, stage="sliding_window:Absent")
        with pytest.raises(RunError, match=r"rank 0 failed: AttributeError.*'Absent'") as error:
            tp.verify(spec)
        log = Path(re.search(r"Its log: (.*\.log)", str(error.value)).group(1))
        assert "Absent" in log.read_text("utf-8")

    def compare(self, directory, held: list[dict[str, np.ndarray]], expected: dict[str, np.ndarray]) -> dict[str, float]:
        for rank, arrays in enumerate(held):
            np.savez(directory / f"gradients-0-rank-{rank}.npz", **arrays)
        table = verify_module._errors(expected, directory, "gradients-0", len(held))
        return dict(zip(table["name"], table["max_relative_error"], strict=True))

    def test_error_is_the_largest_difference_over_the_largest_reference(self, tmp_path):
        found = self.compare(
            tmp_path, [{"a": np.array([1.0, 2.5])}, {"b": np.array([3.0])}], {"a": np.array([1.0, 2.0]), "b": np.array([4.0])}
        )
        assert found == pytest.approx({"a": 0.25, "b": 0.25})

    def test_a_tensor_below_a_thousandth_of_the_largest_is_measured_against_that(self, tmp_path):
        found = self.compare(
            tmp_path, [{"a": np.array([2.0]), "bias": np.array([1e-9])}], {"a": np.array([2.0]), "bias": np.array([0.0])}
        )
        assert found == pytest.approx({"a": 0.0, "bias": 5e-7})

    def test_a_tensor_that_no_rank_holds_is_infinitely_wrong(self, tmp_path):
        found = self.compare(tmp_path, [{"a": np.array([2.0])}], {"a": np.array([2.0]), "b": np.array([2.0])})
        assert found == {"a": 0.0, "b": float("inf")}

    def test_a_gradient_of_nan_is_infinitely_wrong(self, tmp_path):
        found = self.compare(
            tmp_path, [{"a": np.array([2.0]), "b": np.array([np.nan])}], {"a": np.array([2.0]), "b": np.array([2.0])}
        )
        assert found == {"a": 0.0, "b": float("inf")}


class TestSlidingWindow:
    """A stage of one's own, by import path (tests/sliding_window.py); its runs on ranks are among `CASES`."""

    def test_its_runs_are_among_the_verified_ones(self):
        assert sum(spec.stage == SLIDING_WINDOW for spec in CASES.values()) == 8

    def test_it_is_another_model_than_full_attention(self):
        spec = sliding_window("[(1, [7, 1, 4]), (2, [6, 6])]")
        step = step_inputs(spec, 0)
        module = build_reference(spec)
        loss = reference_step(module, step)
        full_loss, full = run_whole(spec.model, step)
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        assert gradients.keys() == full.keys()
        assert abs(loss - full_loss) > 1e-6
        assert worst_error(gradients, full) > 1e-2

    def test_a_class_given_as_an_object_becomes_its_import_path(self):
        spec = tp.RunSpec(small_model(), "[(1, [12])]", stage=SlidingWindowStage)
        assert spec.stage == SLIDING_WINDOW

    def test_a_window_as_long_as_the_sequence_is_full_attention(self, monkeypatch):
        monkeypatch.setattr("sliding_window.WINDOW", 12)
        spec = sliding_window("[(1, [12])] * 2")
        step = step_inputs(spec, 0)
        module = build_reference(spec)
        loss = reference_step(module, step)
        full_loss, full = run_whole(spec.model, step)
        assert loss == pytest.approx(full_loss, rel=1e-12)
        assert worst_error({name: parameter.grad for name, parameter in module.named_parameters()}, full) < 1e-10


TRAINED = {
    # Without biases in float32: a key bias's gradient is rounding alone, which Adam makes an update of.
    (n_ranks, dtype, tied): tp.RunSpec(
        small_model(tied_embedding=tied, bias=dtype == "float64", dropout=0.1),
        "[(1, [7, 1, 4]), (2, [6, 6])]",
        n_ranks=n_ranks,
        n_steps=5,
        n_warmup_steps=0,
        dtype=dtype,
        clip_grad_norm=0.5,
    )
    for n_ranks in (2, 3)
    for dtype in ("float64", "float32")
    for tied in (True, False)
}
TRAINED_BOUND = {"float64": 1e-8, "float32": 1e-4}


@cache
def trained() -> pd.DataFrame:
    return tp.verify(list(TRAINED.values()), what="parameters")


def trained_case(case: tuple[int, str, bool]) -> Any:
    name = f"{case[0]} ranks, {case[1]}, {'tied' if case[2] else 'untied'}"
    return pytest.param(case, id=name)


class TestParameters:
    """Five steps of AdamW with clipping end at the parameters of one process [S18].

    The bounds are wider than the gradients': Adam divides by the root of the second moments. Where
    those are tiny, a gradient's rounding comes out as large as a step.
    """

    @pytest.mark.parametrize("case", [trained_case(case) for case in TRAINED])
    def test_every_parameter_equals_one_process_after_five_clipped_steps(self, case):
        report, spec = trained(), TRAINED[case]
        rows = report[report["spec"] == list(TRAINED).index(case)]
        errors = rows.set_index("name")["max_relative_error"]
        wrong = errors[~(errors <= TRAINED_BOUND[spec.dtype])]
        assert wrong.empty, f"\n{wrong}"

    @pytest.mark.parametrize("case", TRAINED, ids=str)
    def test_every_parameter_is_compared_both_copies_of_a_tied_embedding_too(self, case):
        report, spec = trained(), TRAINED[case]
        names = list(report["name"][report["spec"] == list(TRAINED).index(case)])
        expected = [name for name, _ in build_reference(spec).named_parameters()] + ["loss"]
        copies = ["embedding.weight"] if spec.model.tied_embedding else []
        assert sorted(names) == sorted(expected + copies)

    @pytest.mark.parametrize("case", TRAINED, ids=str)
    def test_every_step_is_clipped(self, case):
        spec = TRAINED[case]
        _, gradients = run_whole(spec.model, step_inputs(spec, 0), getattr(torch, spec.dtype))
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        assert float(norm) > 2 * spec.clip_grad_norm
