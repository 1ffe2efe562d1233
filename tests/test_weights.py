"""The backward in two halves: I and W in any legal order, of any stage, give the gradients of the uncut model."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VARIANTS, Pipeline, make_inputs, run_whole, small_model, worst_error
from strategies import PROPERTY, slicings
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

import terapipe as tp
from terapipe.engine.model import DecoderStage
from terapipe.engine.rank import build_stage
from terapipe.engine.stage import Stage, StepInputs
from terapipe.engine.weights import WeightQueue, attach, linear
from terapipe.errors import RunError

MODEL = small_model()
CUT = "[(1, [7, 1, 4]), (2, [6, 6])]"


def run_split(pipeline: Pipeline, inputs: StepInputs, rng: random.Random, whole_share: float = 0.0):
    """A step whose F's come first; then every I, W and B, in a random legal order: loss, and gradients."""
    for parameter in pipeline.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for stage in pipeline.stages:
        stage.begin_step(inputs)
    units = [(int(microbatch), int(place)) for microbatch, place in inputs.slicing.units[:, :2]]
    for unit in units:
        pipeline.forward(*unit)
    last = len(pipeline.stages) - 1
    left = [[list(range(each.n_slices)) for each in inputs.slicing.microbatches] for _ in pipeline.stages]
    gradients: dict[Any, torch.Tensor | None] = {}
    queued: list[tuple[int, int, int]] = []
    while queued or any(places for stage in left for places in stage):
        ready = [
            (index, microbatch)
            for index, stage in enumerate(left)
            for microbatch, places in enumerate(stage)
            if places and (index == last or (index + 1, microbatch, places[-1]) in gradients)
        ]
        if queued and (not ready or rng.random() < 0.4):
            index, *unit = queued.pop(rng.randrange(len(queued)))
            pipeline.stages[index].weight_backward(*unit)
            continue
        index, microbatch = rng.choice(ready)
        stage, place = pipeline.stages[index], left[index][microbatch].pop()
        run = stage.backward
        if stage.weight_queue is not None and rng.random() >= whole_share:
            run = stage.input_backward
            queued.append((index, microbatch, place))
        gradients[index, microbatch, place] = run(microbatch, place, gradients.get((index + 1, microbatch, place)))
    assert not any(stage.contexts or (stage.weight_queue and stage.weight_queue.products) for stage in pipeline.stages)
    return pipeline.stages[-1].loss, {name: parameter.grad for name, parameter in pipeline.parameters.items()}


def assert_exact(model, slicing, cut=(2, 2), splits=(True, True), dtype=torch.float64, seed=0, whole_share=0.0):
    inputs = make_inputs(model, str(slicing))
    loss, found = run_split(Pipeline(model, cut, dtype, splits=splits), inputs, random.Random(seed), whole_share)
    expected_loss, expected = run_whole(model, inputs, dtype)
    limit = 1e-10 if dtype == torch.float64 else 1e-5
    assert loss == pytest.approx(expected_loss, rel=limit)
    assert worst_error(found, expected) <= limit


class TestExactness:
    @given(slicings(max_microbatches=3, max_slices=5), st.integers(0, 2**32))
    @settings(PROPERTY, max_examples=30)
    def test_random_slicings_with_i_and_w_in_random_legal_orders_are_exact_to_1e_10(self, slicing, seed):
        assert_exact(MODEL, slicing, seed=seed)

    @given(slicings(max_microbatches=3, max_slices=5), st.integers(0, 2**32), st.lists(st.booleans(), min_size=3, max_size=3))
    @settings(PROPERTY, max_examples=30)
    def test_so_they_are_where_some_stages_and_some_units_run_b_instead(self, slicing, seed, splits):
        assert_exact(MODEL, slicing, (1, 2, 1), splits, seed=seed, whole_share=0.5)

    @pytest.mark.parametrize("seed", range(5))
    def test_float32_is_exact_to_1e_5(self, seed):
        assert_exact(MODEL, CUT, dtype=torch.float32, seed=seed, whole_share=0.3)

    @pytest.mark.parametrize("cut", [(4,), (1, 3), (1, 1, 1, 1)])
    @pytest.mark.parametrize("model", [*VARIANTS.values(), small_model(dropout=0.1)], ids=[*VARIANTS, "dropout"])
    def test_every_variant_of_the_model_is_exact(self, model, cut):
        assert_exact(model, CUT, cut, [True] * len(cut))

    def test_one_sequence_whose_one_key_head_has_gradients_in_the_contexts_own_buffer(self):
        """The gradient of such a key's linear layer is a view of rows that the next microbatch writes before W."""
        assert_exact(small_model(n_kv_heads=1, bias=False), "[(1, [12])] * 4", seed=3)
        assert_exact(small_model(n_kv_heads=1, bias=False), "[(1, [5, 7])] * 4", seed=4)

    @pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
    @pytest.mark.parametrize("path", ["sliding_window:SlidingWindowStage", "thin_stage:ThinStage", "test_weights:MixedStage"])
    def test_a_stage_of_ones_own_has_the_gradients_of_its_whole_backward(self, path):
        inputs = make_inputs(MODEL, CUT)
        expected_loss, expected = Pipeline(MODEL, (2, 2), path=path).run(inputs)
        found = run_split(Pipeline(MODEL, (2, 2), path=path, splits=(True, True)), inputs, random.Random(0), 0.2)
        assert found[0] == pytest.approx(expected_loss, rel=1e-12)
        assert worst_error(found[1], expected) <= 1e-12


class Doubling(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, inputs):
        return 2 * functional.linear(inputs, self.weight, self.bias)


class Renamed(nn.Linear):
    """One with nn.Linear's forward."""


class Mixed(nn.Module):
    """Every kind of linear layer between two of a stage's blocks, each (B, T, E) → (B, T, E)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.renamed = Doubling(width, width), Renamed(width, width)
        self.computed = parametrizations.weight_norm(nn.Linear(width, width))
        self.old_computed = weight_norm(nn.Linear(width, width))
        self.frozen, self.frozen_bias = nn.Linear(width, width), nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.frozen_bias.bias.requires_grad_(False)
        self.shared, self.hooked = nn.Linear(width, width), nn.Linear(width, width)
        self.hooked.weight.register_hook(lambda gradient: 3 * gradient)
        self.attended = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, hidden):
        hidden = hidden + self.own(hidden) + self.renamed(hidden) + self.computed(hidden) + self.old_computed(hidden)
        hidden = hidden + self.frozen(hidden) + self.frozen_bias(hidden) + self.hooked(hidden)
        hidden = (
            hidden + self.shared(torch.tanh(self.shared(hidden))) + self.shared(input=hidden.transpose(0, 1)).transpose(0, 1)
        )
        first = hidden[:, :1]  # attends to itself alone: the same for every slicing
        hidden = torch.cat([first + 0 * self.attended(first, first, first, need_weights=False)[0], hidden[:, 1:]], 1)
        return checkpoint(self.renamed, hidden, use_reentrant=False)


class MixedStage(DecoderStage):
    """The built-in model, with all kinds of linear layers in front."""

    def __init__(self, model, layers, is_first, is_last):
        super().__init__(model, layers, is_first, is_last)
        self.mixed = nn.ModuleDict({str(layer): Mixed(model.d_model) for layer in layers})

    def forward(self, inputs, positions, context):
        hidden = self.embed(inputs, positions, context) if self.is_first else inputs
        for name, layer in self.layers.items():
            hidden = layer(self.mixed[name](hidden), positions, context)
        if not self.is_last:
            return hidden
        return linear(self.norm(hidden), self.embedding.weight, queue=self.weight_queue)


def halves(module: nn.Module, inputs: torch.Tensor) -> tuple[WeightQueue, dict[str, torch.Tensor | None]]:
    """A module's queue after I of outputs².sum(), and the gradients there are by then."""
    queue = WeightQueue()
    attach(module, queue)
    queue.begin("unit")
    module(inputs).square().sum().backward()
    queue.end()
    return queue, {name: parameter.grad for name, parameter in module.named_parameters()}


class TestQueue:
    def test_the_built_in_models_i_makes_norms_and_embeddings_and_leaves_every_matrix_and_the_tied_head(self):
        stage = Stage(Pipeline(MODEL, (4,)).stages[0].module, True, True, 32, torch.float64, splits_backward=True)
        stage.begin_step(make_inputs(MODEL, "[(1, [12])]"))
        stage.forward(0, 0, None)
        stage.input_backward(0, 0, None)
        made = {name for name, parameter in stage.module.named_parameters() if parameter.grad is not None}
        everything = {name for name, _ in stage.module.named_parameters()}
        assert everything - made == {name for name in everything if ".attention." in name or ".feed_forward." in name}
        assert len(stage.weight_queue.products[0, 0]) == 4 * 6 + 1  # the head, whose weight is the embedding's
        before = stage.module.embedding.weight.grad.clone()
        stage.weight_backward(0, 0)
        assert not torch.equal(stage.module.embedding.weight.grad, before)
        assert all(parameter.grad is not None for parameter in stage.module.parameters())

    def test_each_use_of_a_shared_layer_is_a_product_of_its_own(self):
        layer = nn.Linear(3, 3).double()
        inputs = torch.randn(2, 5, 3, dtype=torch.float64)
        queue, _ = halves(nn.Sequential(layer, nn.Tanh(), layer), inputs)
        assert len(queue.products["unit"]) == 2
        queue.run("unit")
        expected = nn.Sequential(layer, nn.Tanh(), layer)
        found, layer.weight.grad = layer.weight.grad, None
        del layer.forward
        expected(inputs).square().sum().backward()
        torch.testing.assert_close(found, layer.weight.grad, rtol=1e-12, atol=0)

    @pytest.mark.parametrize(
        ("make", "n_products"),
        [
            (lambda: nn.Linear(3, 4), 1),
            (lambda: Renamed(3, 4), 1),
            (lambda: Doubling(3, 4), 0),
            (lambda: weight_norm(nn.Linear(3, 4)), 0),
            (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), 0),
            (lambda: nn.Linear(3, 4).requires_grad_(False), 0),
            (lambda: torch.compile(nn.Linear(3, 4), backend="eager"), 0),
        ],
        ids=["linear", "subclass", "own forward", "old weight_norm", "parametrised", "frozen", "compiled"],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_what_cannot_wait_is_left_to_autograd(self, make, n_products):
        module, inputs = make(), torch.randn(2, 5, 3, requires_grad=True)
        queue, _ = halves(module, inputs)
        assert len(queue.products["unit"]) == n_products
        queue.run("unit")
        found = [inputs.grad, *(parameter.grad for parameter in module.parameters())]
        queue.is_on, inputs.grad = False, None
        module.zero_grad()
        module(inputs).square().sum().backward()
        expected = [inputs.grad, *(parameter.grad for parameter in module.parameters())]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_under_autocast_autograd_does_it(self):
        module, inputs = nn.Linear(3, 4), torch.randn(2, 3)
        queue = WeightQueue()
        attach(module, queue)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = module(inputs)
        queue.begin("unit")
        outputs.sum().backward()
        assert not queue.products["unit"]
        assert module.weight.grad is not None

    def test_first_gradients_are_assigned_and_later_ones_added_in_place(self):
        module, inputs = nn.Linear(3, 4), torch.randn(7, 3)
        queue, made = halves(module, inputs)
        assert made == {"weight": None, "bias": None}
        queue.run("unit")
        kept, once = module.weight.grad, module.weight.grad.clone()
        queue.begin("again")
        module(inputs).square().sum().backward()
        queue.run("again")
        assert module.weight.grad is kept
        torch.testing.assert_close(kept, 2 * once)

    def test_bytes_held_count_a_shared_input_once_and_are_0_after_w(self):
        module = nn.ModuleList(nn.Linear(8, 4, bias=False) for _ in range(3))
        queue = WeightQueue()
        attach(module, queue)
        inputs = torch.randn(5, 8)
        assert queue.n_bytes == 0
        queue.begin("unit")
        sum(layer(inputs).square().sum() for layer in module).backward()
        assert queue.n_bytes == 4 * (5 * 8 + 3 * 5 * 4)
        queue.run("unit")
        assert queue.n_bytes == 0

    @pytest.mark.parametrize("which", ["inputs", "gradient"])
    def test_a_tensor_changed_between_i_and_w_is_refused(self, which):
        queue, _ = halves(nn.Linear(3, 4), torch.randn(2, 3))
        getattr(queue.products["unit"][0], which).add_(1)
        with pytest.raises(RunError, match=r"changed in place between I and W.*clone"):
            queue.run("unit")

    def test_a_stage_whose_schedule_never_splits_keeps_torchs_own_layers(self):
        stage = Pipeline(MODEL, (4,)).stages[0]
        assert stage.weight_queue is None
        assert not any("forward" in vars(module) for module in stage.module.modules())


class TestBuildStage:
    def test_a_stage_splits_where_a_schedule_of_its_run_does(self):
        orders = {0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", "1I0", "1F1", "1W0", "1B1"]}
        schedule = tp.Schedule.from_orders(orders, "[(1, [8])] * 2")
        spec = tp.RunSpec(MODEL, schedule.slicing, schedule)
        assert [build_stage(spec, index).weight_queue is not None for index in (0, 1)] == [False, True]
        assert [build_stage(spec, index, splits_backward=True).weight_queue is not None for index in (0, 1)] == [True, True]
