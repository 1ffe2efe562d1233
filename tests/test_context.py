"""Slices see exactly what the whole sequence sees, forward and backward. One process, no messages."""

import math

import pytest
import torch
from models import Pipeline, make_inputs, run_whole, small_model, worst_error
from reference import compositions

from terapipe.engine.context import ContextPool, MaskSource, MicrobatchContext, SliceContext, WholeContext
from terapipe.engine.model import Attention, attend
from terapipe.engine.stage import draw_weights

SEQ_TOKENS, N_SEQUENCES = 7, 2
WAYS = list(compositions(SEQ_TOKENS))  # all 64 ways to cut 7 tokens, 1 to 7 slices
HEADS = [
    pytest.param({}, id="4 key/value heads"),
    pytest.param({"n_kv_heads": 2}, id="2 key/value heads"),
    pytest.param({"n_kv_heads": 1, "position": "rotary"}, id="1 key/value head, rotary"),
]


def make_context() -> MicrobatchContext:
    return MicrobatchContext(MaskSource(0, 0, 0, SEQ_TOKENS), ContextPool())


def make_attention(changes: dict) -> Attention:
    attention = Attention(small_model(**changes), layer=0)
    draw_weights(attention, seed=0)
    for name, parameter in attention.named_parameters():  # 0.02² between queries and keys would be all but uniform
        parameter.data = parameter.data * 20 + (0.1 if name.endswith("bias") else 0.0)
    return attention.double()


def random_rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_slices(attention: Attention, inputs: torch.Tensor, lengths: tuple[int, ...], gradient: torch.Tensor):
    """Forward slice by slice, backward last slice first; the outputs, and the gradient of the inputs."""
    microbatch, ran, start = make_context(), [], 0
    for length in lengths:
        rows = inputs[:, start : start + length].clone().requires_grad_()
        outputs = attention(rows, torch.arange(start, start + length), SliceContext(microbatch, start))
        ran.append((rows, outputs, gradient[:, start : start + length]))
        start += length
    for _, outputs, received in reversed(ran):
        outputs.backward(received)
    return torch.cat([outputs.detach() for _, outputs, _ in ran], 1), torch.cat([rows.grad for rows, _, _ in ran], 1)


def run_unsliced(attention: Attention, inputs: torch.Tensor, gradient: torch.Tensor):
    rows = inputs.clone().requires_grad_()
    outputs = attention(rows, torch.arange(inputs.shape[1]), WholeContext(MaskSource(0, 0, 0, inputs.shape[1])))
    outputs.backward(gradient)
    return outputs.detach(), rows.grad


def take_gradients(attention: Attention) -> dict[str, torch.Tensor]:
    gradients = {name: parameter.grad for name, parameter in attention.named_parameters()}
    attention.zero_grad()
    return gradients


class TestCausality:
    """S12: queries are the last rows of the prefix."""

    @pytest.mark.parametrize(("length", "place"), [(4, 0), (4, 1), (4, 2), (1, 3), (3, 5)])
    def test_row_i_of_slice_k_sees_kl_plus_i_plus_1_keys_in_equal_shares(self, length, place):
        total = (place + 1) * length
        queries, keys = torch.zeros(1, 1, length, 4), random_rows(0, 1, 1, total, 4).float()
        shares = attend(queries, keys, torch.eye(total)[None, None])[0, 0]  # values that tell the keys apart
        for row, share in enumerate(shares):
            seen = place * length + row + 1
            assert share.tolist() == pytest.approx([1 / seen] * seen + [0.0] * (total - seen), abs=1e-7)

    def test_shares_of_two_queries_after_three_keys_typed_out(self):
        shares = attend(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4), torch.eye(5)[None, None])[0, 0]
        expected = [
            [1 / 4, 1 / 4, 1 / 4, 1 / 4, 0.0],
            [1 / 5, 1 / 5, 1 / 5, 1 / 5, 1 / 5],
        ]
        torch.testing.assert_close(shares, torch.tensor(expected))

    @pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
    def test_attention_is_the_softmax_of_scaled_products_written_out(self, n_kv_heads):
        queries, keys, values = (
            random_rows(1, 2, 4, 3, 8),
            random_rows(2, 2, n_kv_heads, 7, 8),
            random_rows(3, 2, n_kv_heads, 7, 8),
        )
        found = attend(queries, keys, values)
        for batch in range(2):
            for head in range(4):
                group = head * n_kv_heads // 4
                for row in range(3):
                    seen = 4 + row + 1
                    weights = torch.exp(keys[batch, group, :seen] @ queries[batch, head, row] / math.sqrt(8))
                    expected = (weights / weights.sum()) @ values[batch, group, :seen]
                    torch.testing.assert_close(found[batch, head, row], expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("changes", HEADS)
    def test_every_slice_of_all_64_cuts_equals_its_rows_of_full_attention(self, changes):
        attention, inputs = make_attention(changes), random_rows(4, N_SEQUENCES, SEQ_TOKENS, 32)
        gradient = torch.zeros_like(inputs)
        expected, _ = run_unsliced(attention, inputs, gradient)
        for lengths in WAYS:
            found, _ = run_slices(attention, inputs, lengths, gradient)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda text, cut=lengths: f"{cut}: {text}")


class TestGradients:
    """S13: what later slices owe to earlier keys and values comes back."""

    @pytest.mark.parametrize("changes", HEADS)
    def test_every_weight_and_input_gradient_of_all_64_cuts_equals_the_unsliced_one(self, changes):
        attention, inputs = make_attention(changes), random_rows(5, N_SEQUENCES, SEQ_TOKENS, 32)
        gradient = random_rows(6, *inputs.shape)
        _, expected_inputs = run_unsliced(attention, inputs, gradient)
        expected = take_gradients(attention)
        assert {"key.weight", "value.weight"} < expected.keys()
        for lengths in WAYS:
            _, found_inputs = run_slices(attention, inputs, lengths, gradient)
            found = take_gradients(attention)
            assert worst_error(found, expected) < 1e-12, lengths
            torch.testing.assert_close(found_inputs, expected_inputs, rtol=1e-12, atol=1e-12)

    def test_a_detached_prefix_leaves_outputs_right_and_key_and_value_gradients_wrong(self, monkeypatch):
        attention, inputs = make_attention({}), random_rows(7, N_SEQUENCES, SEQ_TOKENS, 32)
        gradient = random_rows(8, *inputs.shape)
        outputs, _ = run_unsliced(attention, inputs, gradient)
        expected, store = take_gradients(attention), MicrobatchContext.store

        def detached(self, layer, kind, rows, start):
            return torch.cat([store(self, layer, kind, rows, start)[:, :, :start].detach(), rows], 2)

        monkeypatch.setattr(MicrobatchContext, "store", detached)
        found_outputs, _ = run_slices(attention, inputs, (3, 3, 1), gradient)
        found = take_gradients(attention)
        torch.testing.assert_close(found_outputs, outputs, rtol=1e-12, atol=1e-12)
        wrong = {name for name in expected if worst_error({name: found[name]}, {name: expected[name]}) > 1e-3}
        # The key bias's gradient is 0 (a constant on every key cancels in the softmax), but only with all its parts.
        assert wrong == {"key.weight", "value.weight", "key.bias", "value.bias"}

    def test_appending_equals_torch_cat_under_any_function_of_the_prefix(self):
        lengths = (3, 1, 2, 1)
        pieces = [random_rows(10 + index, 1, 2, length, 4) for index, length in enumerate(lengths)]

        def losses(prefixes):
            return [(prefix**3).sum() * (index + 1) for index, prefix in enumerate(prefixes)]

        whole = [piece.clone().requires_grad_() for piece in pieces]
        sum(losses(torch.cat(whole[: index + 1], 2) for index in range(4))).backward()

        sliced, context, start, prefixes = [piece.clone().requires_grad_() for piece in pieces], make_context(), 0, []
        for rows in sliced:
            prefixes.append(context.store(0, "keys", rows, start))
            start += rows.shape[2]
        for loss in reversed(losses(prefixes)):
            loss.backward()
        for found, expected in zip(sliced, whole, strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-13, atol=1e-13)

    def test_gradient_of_two_slices_typed_out(self):
        context = make_context()
        first, second = torch.ones(1, 1, 4, 1, requires_grad=True), torch.ones(1, 1, 3, 1, requires_grad=True)
        one, two = context.store(0, "keys", first, 0), context.store(0, "keys", second, 4)
        two.backward(torch.arange(7.0).view(1, 1, 7, 1))  # rows 0…6 get 0…6
        one.backward(torch.full((1, 1, 4, 1), 10.0))  # rows 0…3 get 10 more
        assert second.grad.flatten().tolist() == [4.0, 5.0, 6.0]
        assert first.grad.flatten().tolist() == [10.0, 11.0, 12.0, 13.0]


class TestBuffers:
    def test_keys_and_values_of_a_slice_are_left_alone_by_later_slices(self):
        context = make_context()
        keys, values = random_rows(20, 1, 2, SEQ_TOKENS, 4), random_rows(21, 1, 2, SEQ_TOKENS, 4)
        seen = []
        for start, end in ((0, 3), (3, 4), (4, 7)):
            prefixes = SliceContext(context, start).append(5, keys[:, :, start:end], values[:, :, start:end])
            seen.append(prefixes)
            for (early_keys, early_values), stop in zip(seen, (3, 4, 7), strict=False):
                assert torch.equal(early_keys, keys[:, :, :stop])
                assert torch.equal(early_values, values[:, :, :stop])

    def test_all_slices_of_a_layer_share_one_preallocated_buffer(self):
        context, rows = make_context(), random_rows(22, 1, 2, SEQ_TOKENS, 4)
        places = [context.store(1, "keys", rows[:, :, start : start + 1], start).data_ptr() for start in range(SEQ_TOKENS)]
        assert len(set(places)) == 1
        assert list(context.buffers) == [(1, "keys")]

    def test_layers_and_kinds_have_buffers_of_their_own(self):
        context, rows = make_context(), random_rows(23, 1, 2, SEQ_TOKENS, 4)
        for layer in (1, 2):
            SliceContext(context, 0).append(layer, rows, -rows)
        assert list(context.buffers) == [(1, "keys"), (1, "values"), (2, "keys"), (2, "values")]
        assert len({buffer.rows.data_ptr() for buffer in context.buffers.values()}) == 4

    def test_buffers_go_back_to_the_pool_after_a_microbatchs_last_backward(self):
        model = small_model()
        pipeline = Pipeline(model, (2, 2))
        inputs = make_inputs(model, "[(1, [3, 4])] * 2")
        first = pipeline.stages[0]
        for stage in pipeline.stages:
            stage.begin_step(inputs)
        for unit in ((0, 0), (0, 1), (1, 0), (1, 1)):
            pipeline.forward(*unit)
        held = {microbatch: list(context.buffers.values()) for microbatch, context in first.contexts.items()}
        assert [len(buffers) for buffers in held.values()] == [4, 4]  # keys and values of two layers
        pipeline.backward(1, 1)
        assert first.pool.free == {}
        pipeline.backward(1, 0)
        assert sorted(first.contexts) == [0]
        assert [set(free) for free in first.pool.free.values()] == [set(held[1])]
        pipeline.backward(0, 1)
        pipeline.backward(0, 0)
        assert (first.contexts, first.kept) == ({}, {})
        assert [set(free) for free in first.pool.free.values()] == [{*held[0], *held[1]}]

    def test_later_steps_reuse_the_buffers_and_allocate_none(self):
        model = small_model()
        pipeline = Pipeline(model, (3, 1))
        counts = []
        for step in range(3):
            pipeline.run(make_inputs(model, "[(1, [3, 4])] * 2", step=step))
            counts.append([sum(map(len, stage.pool.free.values())) for stage in pipeline.stages])
        assert counts == [[12, 4]] * 3  # 2 kinds × layers × 2 microbatches in flight

    def test_microbatches_of_other_sizes_get_buffers_of_their_own(self):
        model = small_model()
        pipeline = Pipeline(model, (4,))
        pipeline.run(make_inputs(model, "[(1, [3, 4]), (2, [7])]"))
        pipeline.run(make_inputs(model, "[(1, [5])]"))
        assert {key[:4] for key in pipeline.stages[0].pool.free} == {(1, 4, 8, 7), (2, 4, 8, 7), (1, 4, 8, 5)}

    def test_what_a_used_buffer_still_holds_has_no_effect(self):
        model = small_model()
        pipeline = Pipeline(model, (2, 2))
        inputs = make_inputs(model, "[(1, [3, 1, 3])] * 2")
        pipeline.run(inputs)
        for stage in pipeline.stages:
            for buffer in (each for free in stage.pool.free.values() for each in free):
                buffer.rows.fill_(float("nan"))
                buffer.gradient.fill_(float("nan"))
        loss, gradients = pipeline.run(inputs)
        expected_loss, expected = run_whole(model, inputs)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert worst_error(gradients, expected) < 1e-10


class TestDropout:
    """S15: masks belong to places in the sequence, not to slices, ranks or the order of drawing."""

    P = 0.3

    def mask(self, start=0, length=SEQ_TOKENS, *, seed=0, step=0, microbatch=0, layer=0, site=0, features=64):
        source = MaskSource(seed, step, microbatch, SEQ_TOKENS)
        return source.drop(torch.ones(N_SEQUENCES, length, features), start, layer, site, self.P)

    def test_slices_of_all_64_cuts_get_the_rows_of_one_mask(self):
        expected = self.mask()
        for lengths in WAYS:
            starts = [sum(lengths[:index]) for index in range(len(lengths))]
            pieces = [self.mask(start, length) for start, length in zip(starts, lengths, strict=True)]
            assert torch.equal(torch.cat(pieces, 1), expected), lengths

    def test_the_order_of_drawing_does_not_matter(self):
        ones, source = torch.ones(N_SEQUENCES, SEQ_TOKENS, 64), MaskSource(0, 0, 0, SEQ_TOKENS)
        backwards = [source.drop(ones, 0, layer, site, self.P) for layer in (3, 2) for site in (1, 0)]
        forwards = [self.mask(layer=layer, site=site) for layer in (2, 3) for site in (0, 1)]
        assert all(torch.equal(a, b) for a, b in zip(reversed(backwards), forwards, strict=True))

    def test_seed_step_microbatch_layer_and_site_each_give_another_mask(self):
        places = [{}, {"seed": 1}, {"step": 1}, {"step": -1}, {"microbatch": 1}, {"layer": 1}, {"layer": -1}, {"site": 1}]
        masks = [self.mask(**place) for place in places]
        assert all(torch.equal(a, b) == (i == j) for i, a in enumerate(masks) for j, b in enumerate(masks))

    def test_a_share_p_is_dropped_and_the_rest_scaled_to_keep_the_mean(self):
        mask = self.mask(features=4096)
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
        assert float((mask == 0).float().mean()) == pytest.approx(self.P, abs=0.01)
        assert float(mask.mean()) == pytest.approx(1.0, abs=0.01)

    def test_probability_0_returns_the_inputs_themselves(self):
        rows = torch.ones(1, 2, 4)
        assert MaskSource(0, 0, 0, SEQ_TOKENS).drop(rows, 3, 0, 0, 0.0) is rows

    @pytest.mark.parametrize("layers_per_stage", [(4,), (1, 3), (1, 1, 1, 1)])
    @pytest.mark.parametrize("slicing", ["[(1, [7])] * 2", "[(1, [7, 1, 4])] * 2", "[(1, [1] * 12), (1, [5, 7])]"])
    def test_dropped_loss_and_gradients_equal_the_uncut_models(self, layers_per_stage, slicing):
        model = small_model(dropout=0.1)
        inputs = make_inputs(model, slicing)
        loss, gradients = Pipeline(model, layers_per_stage).run(inputs)
        expected_loss, expected = run_whole(model, inputs)
        undropped_loss, _ = run_whole(small_model(), inputs)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert abs(loss - undropped_loss) > 1e-3
        assert worst_error(gradients, expected) < 1e-10
