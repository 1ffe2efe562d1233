"""Stages in one process, tensors passed by hand: cuts, padding, and what a stage of your own may return."""

import pytest
import torch
from models import VARIANTS, Pipeline, make_inputs, run_whole, small_model, worst_error
from torch import nn

from terapipe.config import split_layers
from terapipe.engine.context import MaskSource, WholeContext
from terapipe.engine.model import DecoderStage
from terapipe.engine.stage import Stage, build_module, draw_weights, loss_sum
from terapipe.engine.text import IGNORED
from terapipe.errors import RunError

MODEL = small_model()
SLICINGS = [
    "[(3, [12])]",
    "[(3, [4, 4, 4])]",
    "[(3, [7, 1, 4])]",
    "[(3, [1] * 12)]",
    "[(1, [5, 7]), (2, [2, 9, 1])]",
    "[(1, [12]), (1, [6, 6]), (1, [3] * 4)]",
]


def padded(slicing: str, *valid: range):
    """Inputs of three sequences of 12 tokens whose labels count only in the given ranges."""
    labels = torch.cat(make_inputs(MODEL, slicing).labels)
    for row, kept in zip(labels, valid, strict=True):
        row[[place for place in range(12) if place not in kept]] = IGNORED
    sizes = [each.n_sequences for each in make_inputs(MODEL, slicing).slicing.microbatches]
    return make_inputs(MODEL, slicing, labels.split(sizes))


def assert_exact(inputs, layers_per_stage=(3, 1), model=MODEL) -> float:
    """Loss and every gradient finite and equal to the uncut model's; returns the loss."""
    loss, gradients = Pipeline(model, layers_per_stage).run(inputs)
    expected_loss, expected = run_whole(model, inputs)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert worst_error(gradients, expected) < 1e-10
    return loss


class TestLoss:
    """The loss is Σ over valid tokens ÷ the batch's valid tokens [S17]."""

    def test_loss_of_three_tokens_typed_out(self):
        logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2]]], dtype=torch.float64))
        labels = torch.tensor([[0, IGNORED, 2]])
        assert float(loss_sum(logits, labels)) == pytest.approx(-torch.log(torch.tensor([0.5, 0.2])).sum().item())

    def test_loss_of_only_padding_is_0_with_gradient_0(self):
        logits = torch.randn(2, 3, 5, requires_grad=True)
        loss = loss_sum(logits, torch.full((2, 3), IGNORED))
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(logits.grad, torch.zeros_like(logits))

    def test_a_low_precision_loss_is_summed_in_float32(self):
        logits, labels = torch.randn(1, 4096, 5), torch.randint(5, (1, 4096))
        found = loss_sum(logits.bfloat16(), labels)
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(float(loss_sum(logits.bfloat16().double(), labels)), rel=1e-5)

    @pytest.mark.parametrize("slicing", SLICINGS)
    def test_whole_batch_is_the_mean_over_its_36_tokens_however_it_is_cut(self, slicing):
        inputs = make_inputs(MODEL, slicing)
        module = build_module(MODEL, range(4), 0, torch.float64)
        whole = make_inputs(MODEL, "[(3, [12])]")
        logits = module(whole.tokens[0], torch.arange(12), WholeContext(MaskSource(0, 0, 0, 12)))
        chances = logits.softmax(-1).gather(-1, whole.labels[0][..., None])
        assert inputs.n_valid == 36
        assert assert_exact(inputs) == pytest.approx(-chances.log().mean().item(), rel=1e-12)


class TestPadding:
    """Labels of −100 do not count [S16]."""

    @pytest.mark.parametrize("slicing", SLICINGS)
    @pytest.mark.parametrize(
        "valid",
        [
            pytest.param((range(12), range(7), range(3)), id="ragged right"),
            pytest.param((range(12), range(5, 12), range(9, 12)), id="ragged left"),
            pytest.param((range(7, 12), range(12), range(12)), id="slice 0 of 7/1/4 all padding in sequence 0"),
            pytest.param((range(8, 12), range(8, 12), range(8, 12)), id="slices 0 and 1 of 7/1/4 all padding"),
            pytest.param((range(7), range(7), range(7)), id="last slices of 7/1/4 all padding"),
            pytest.param((range(0), range(12), range(2, 9)), id="sequence 0 all padding"),
            pytest.param((range(0), range(0), range(11, 12)), id="one token counts"),
        ],
    )
    def test_padded_batch_equals_the_uncut_model(self, slicing, valid):
        inputs = padded(slicing, *valid)
        assert inputs.n_valid == sum(map(len, valid))
        assert_exact(inputs)

    def test_a_microbatch_of_only_padding_adds_nothing(self):
        inputs = padded("[(1, [7, 1, 4])] * 3", range(12), range(0), range(5))
        loss, gradients = Pipeline(MODEL, (2, 2)).run(inputs)
        assert_exact(inputs)
        without = make_inputs(MODEL, "[(1, [7, 1, 4])] * 2", [inputs.labels[0], inputs.labels[2]])
        without = without._replace(tokens=[inputs.tokens[0], inputs.tokens[2]])
        expected_loss, expected = run_whole(MODEL, without)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert worst_error(gradients, expected) < 1e-10

    def test_padding_has_no_effect_on_the_tokens_before_it(self):
        inputs = padded("[(1, [7, 1, 4])] * 3", range(12), range(8), range(3))
        loss, gradients = Pipeline(MODEL, (2, 2)).run(inputs)
        other_tokens = [tokens.clone() for tokens in inputs.tokens]
        for tokens, n_valid in zip(other_tokens, (12, 8, 3), strict=True):
            tokens[:, n_valid:] = (tokens[:, n_valid:] + 17) % MODEL.vocab_size
        other_loss, other_gradients = Pipeline(MODEL, (2, 2)).run(inputs._replace(tokens=other_tokens))
        assert other_loss == pytest.approx(loss, rel=1e-13)
        assert worst_error(other_gradients, gradients) < 1e-12

    def test_padding_inside_a_float32_model_is_exact_too(self):
        inputs = padded("[(3, [7, 1, 4])]", range(7, 12), range(3), range(12))
        loss, gradients = Pipeline(MODEL, (1, 3), torch.float32).run(inputs)
        expected_loss, expected = run_whole(MODEL, inputs, torch.float32)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert worst_error(gradients, expected) < 1e-5


class TestCut:
    """However layers are cut into stages, it is the same model [S11]."""

    @pytest.mark.parametrize("layers_per_stage", [(4,), (3, 1), (1, 3), (1, 2, 1), (1, 1, 1, 1)])
    def test_gradients_equal_the_uncut_model(self, layers_per_stage):
        assert_exact(make_inputs(MODEL, "[(1, [7, 1, 4]), (2, [6, 6])]"), layers_per_stage)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_gradients_equal_the_uncut_model_of_every_variant(self, variant):
        model = VARIANTS[variant]
        assert_exact(make_inputs(model, "[(1, [7, 1, 4]), (2, [6, 6])]"), (1, 2, 1), model)

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("layers_per_stage", [(4,), (3, 1), (1, 2, 1), (1, 1, 1, 1)])
    def test_weights_do_not_depend_on_the_cut(self, variant, layers_per_stage):
        model = VARIANTS[variant]
        whole = dict(build_module(model, range(4), 7, torch.float64).named_parameters())
        seen = {}
        for layers in split_layers(4, len(layers_per_stage), layers_per_stage):
            for name, parameter in build_module(model, layers, 7, torch.float64).named_parameters():
                assert torch.equal(parameter, whole[name]), name
                seen[name] = parameter
        assert seen.keys() == whole.keys()

    @pytest.mark.parametrize(("n_layers", "n_stages"), [(30, 4), (30, 7), (5, 5), (7, 3), (4, 1)])
    @pytest.mark.parametrize("tied", [True, False])
    def test_names_and_counts_of_the_stages_are_those_of_the_unsplit_model(self, n_layers, n_stages, tied):
        model = small_model(n_layers=n_layers, d_model=8, n_heads=2, tied_embedding=tied)
        whole = {name: p.shape for name, p in build_module(model, range(n_layers), 0, torch.float32).named_parameters()}
        ranges = split_layers(n_layers, n_stages)
        stages = [
            {name: p.shape for name, p in build_module(model, layers, 0, torch.float32).named_parameters()} for layers in ranges
        ]
        assert [layer for layers in ranges for layer in layers] == list(range(n_layers))
        copies = {"embedding.weight"} if tied and n_stages > 1 else set()
        names = [name for stage in stages for name in stage]
        assert {name for name in names if names.count(name) > 1} == copies
        assert {name: shape for stage in stages for name, shape in stage.items()} == whole
        n_parameters = sum(shape.numel() for stage in stages for shape in stage.values())
        n_copied = sum(whole[name].numel() for name in copies)
        assert n_parameters - n_copied == sum(shape.numel() for shape in whole.values())

    def test_number_of_parameters_of_gpt2_small_is_124439808(self):
        # Of the published checkpoint (https://huggingface.co/openai-community/gpt2), counted by hand too:
        # 50257·768 + 1024·768 + 12·(4·768·768 + 4·768 + 8·768·768 + 5·768 + 4·768) + 2·768
        model = small_model(n_layers=12, d_model=768, n_heads=12, vocab_size=50257, max_seq_tokens=1024)
        with torch.device("meta"):
            stages = [DecoderStage(model, layers, layers.start == 0, layers.stop == 12) for layers in split_layers(12, 4)]
        total = sum(parameter.numel() for stage in stages for parameter in stage.parameters())
        assert total - 50257 * 768 == 124_439_808  # the last stage holds the tied embedding a second time


class TestDrawWeights:
    def test_weights_do_not_depend_on_the_order_or_number_of_parameters(self):
        both, one = nn.Module(), nn.Module()
        both.first, both.second, one.second = nn.Linear(3, 4), nn.Linear(5, 6), nn.Linear(5, 6)
        for module in (both, one):
            draw_weights(module, seed=3)
        assert torch.equal(both.second.weight, one.second.weight)

    def drawn(self, seed: int, name: str) -> nn.Linear:
        module = nn.Module()
        module.add_module(name, nn.Linear(300, 300))
        draw_weights(module, seed)
        return getattr(module, name)

    def test_matrices_have_std_0_02_and_biases_are_0(self):
        linear = self.drawn(0, "a")
        assert float(linear.weight.detach().mean()) == pytest.approx(0.0, abs=3e-4)
        assert float(linear.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
        assert torch.equal(linear.bias, torch.zeros(300))

    def test_every_name_has_other_weights(self):
        assert not torch.equal(self.drawn(0, "a").weight, self.drawn(0, "b").weight)
        assert torch.equal(self.drawn(0, "a").weight, self.drawn(0, "a").weight)

    @pytest.mark.parametrize("seed", [1, 2, 2**31, 2**32 - 1, 2**40])
    def test_every_seed_gives_other_weights(self, seed):
        assert not torch.equal(self.drawn(0, "a").weight, self.drawn(seed, "a").weight)

    def test_float64_weights_are_the_float32_ones(self):
        narrow, wide = (build_module(MODEL, range(4), 0, dtype) for dtype in (torch.float32, torch.float64))
        for (name, a), (_, b) in zip(narrow.named_parameters(), wide.named_parameters(), strict=True):
            assert (a.dtype, b.dtype) == (torch.float32, torch.float64), name
            assert torch.equal(a.double(), b), name

    def test_norms_keep_their_weights_of_1(self):
        module = build_module(MODEL, range(4), 0, torch.float32)
        assert torch.equal(module.norm.weight, torch.ones(32))


class Returning(nn.Module):
    """A stage of somebody's own whose forward is given."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs, positions, context):
        return self.function(inputs)


class TestOutputs:
    """What a stage of your own returns is checked: messages carry no shapes."""

    def run(self, function) -> None:
        stage = Stage(Returning(function), is_first=False, is_last=False, d_model=32, dtype=torch.float64)
        stage.begin_step(make_inputs(MODEL, "[(2, [7, 5])]"))
        stage.forward(0, 0, torch.zeros(2, 7, 32, dtype=torch.float64))
        stage.forward(0, 1, torch.zeros(2, 5, 32, dtype=torch.float64))

    @pytest.mark.parametrize(
        ("function", "found", "expected"),
        [
            (lambda rows: rows[:, :-1], "(2, 6, 32)", "(2, 7, 32)"),
            (lambda rows: rows[:, :, :16], "(2, 7, 16)", "(2, 7, 32)"),
            (lambda rows: rows.transpose(1, 2), "(2, 32, 7)", "(2, 7, 32)"),
            (lambda rows: rows.flatten(0, 1), "(14, 32)", "(2, 7, 32)"),
            (lambda rows: rows.sum(), "()", "(2, 7, 32)"),
            (lambda rows: rows if rows.shape[1] == 7 else torch.cat([rows, rows], 1), "(2, 10, 32)", "(2, 5, 32)"),
        ],
        ids=["a token short", "half the features", "transposed", "flattened", "a scalar", "the second slice twice"],
    )
    def test_a_wrong_shape_is_refused_naming_stage_and_both_shapes(self, function, found, expected):
        with pytest.raises(RunError) as error:
            self.run(function)
        for words in ("Returning", f"shape {found}", f"shape {expected}", "(sequences, slice tokens, d_model)"):
            assert words in str(error.value)

    def test_the_right_shape_is_taken(self):
        self.run(lambda rows: rows * 2)

    def test_a_wrong_dtype_is_refused_naming_both(self):
        with pytest.raises(RunError, match=r"Returning.*float32.*float64"):
            self.run(lambda rows: rows.float())
