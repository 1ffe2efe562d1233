"""Seeded faults: each class is the built-in stage with one thing wrong in the engine around it.

Named as a run's stage ("faulty:DetachedContext"), a fault is planted in the ranks alone, and only
while a step of that run is under way: the one process that `tp.verify` compares with stays whole, and
so do the other runs of the launch.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.nn import functional

from terapipe.engine import model as model_module
from terapipe.engine import rank as rank_module
from terapipe.engine import stage as stage_module
from terapipe.engine.context import MaskSource, MicrobatchContext, SliceContext, _Append
from terapipe.engine.control import ENVIRONMENT
from terapipe.engine.mesh import Mesh
from terapipe.engine.model import Block, DecoderStage, Rotary
from terapipe.engine.optimizer import Optimizer
from terapipe.engine.p2p import Mailbox
from terapipe.engine.rank import RankRun
from terapipe.engine.weights import Product, WeightQueue, linear
from terapipe.schedule import Kind

Patch = Callable[[Any, str, Any], object]  # owner, name, what stands there during the step
TWO_STEPS = ["[(1, [7, 5])] * 2", "[(1, [7, 5])] * 2"]


class Faulty(DecoderStage):
    """A fault: how to plant it, and the run that shows it."""

    what: ClassVar[str] = "gradients"
    slicing: ClassVar[Any] = "[(1, [7, 1, 4]), (2, [6, 6])]"
    changes: ClassVar[dict[str, Any]] = {}  # of the model
    schedule: ClassVar[str] = "terapipe"
    silent: ClassVar[bool] = False  # whether the loss stays right

    @staticmethod
    def plant(patch: Patch, run: RankRun, step: int) -> None:
        raise NotImplementedError


# --- context ---------------------------------------------------------------------------------------


def _detach(patch: Patch, kinds: tuple[str, ...]) -> None:
    store = MicrobatchContext.store

    def detached(self, layer, kind, rows, start):
        prefix = store(self, layer, kind, rows, start)
        return torch.cat([prefix[:, :, :start].detach(), rows], 2) if kind in kinds else prefix

    patch(MicrobatchContext, "store", detached)


class DetachedContext(Faulty):
    """Later slices send no gradient to earlier keys and values."""

    silent = True

    @staticmethod
    def plant(patch, run, step):
        _detach(patch, ("keys", "values"))


class ContextGradientOfKeysOnly(Faulty):
    silent = True

    @staticmethod
    def plant(patch, run, step):
        _detach(patch, ("values",))


class ContextGradientOfValuesOnly(Faulty):
    silent = True

    @staticmethod
    def plant(patch, run, step):
        _detach(patch, ("keys",))


class OwnRowsDropped(Faulty):
    """A slice's keys and values get later slices' gradients, but not its own."""

    silent = True

    @staticmethod
    def plant(patch, run, step):
        backward = _Append.backward

        def without_own(ctx, gradient):
            total, *rest = backward(ctx, gradient)
            return total - gradient[:, :, ctx.start : ctx.end], *rest

        patch(_Append, "backward", staticmethod(without_own))


class GradientOverwritten(Faulty):
    """The gradient buffer keeps the last writer's part instead of the sum."""

    silent = True

    @staticmethod
    def plant(patch, run, step):
        def overwriting(ctx, gradient):
            ctx.buffer.gradient[:, :, : ctx.end] = gradient
            return ctx.buffer.gradient[:, :, ctx.start : ctx.end], None, None

        patch(_Append, "backward", staticmethod(overwriting))


class GradientOfEarlierMicrobatchKept(Faulty):
    """A used buffer's gradient is added to."""

    silent = True
    slicing = TWO_STEPS

    @staticmethod
    def plant(patch, run, step):
        def adding(ctx, gradient):
            ctx.buffer.gradient[:, :, : ctx.end] += gradient
            return ctx.buffer.gradient[:, :, ctx.start : ctx.end], None, None

        patch(_Append, "backward", staticmethod(adding))


class ContextStartsOneEarly(Faulty):
    """Off by one: a slice's rows replace the last one of the slice before."""

    @staticmethod
    def plant(patch, run, step):
        patch(SliceContext, "append", _append_early)


def _append_early(self, layer, keys, values):
    start = max(0, self.n_tokens - 1)
    return tuple(self.microbatch.store(layer, kind, rows, start) for kind, rows in (("keys", keys), ("values", values)))


class MicrobatchesShareContext(Faulty):
    """Two microbatches in flight write the same buffers."""

    silent = True
    slicing = "[(1, [7, 5])] * 2"

    @staticmethod
    def plant(patch, run, step):
        init, shared = MicrobatchContext.__init__, {}

        def sharing(self, masks, pool):
            init(self, masks, pool)
            self.buffers = shared.setdefault(id(pool), {})

        patch(MicrobatchContext, "__init__", sharing)


# --- model -----------------------------------------------------------------------------------------


class TopLeftMask(Faulty):
    """Query i of a slice sees keys 0 … i of the whole sequence."""

    @staticmethod
    def plant(patch, run, step):
        def top_left(queries, keys, values):
            return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)

        patch(model_module, "attend", top_left)


class OneKeyTooMany(Faulty):
    """A token behind a context sees the next one."""

    @staticmethod
    def plant(patch, run, step):
        def shifted(length, total, dtype):
            return torch.full((length, total), float("-inf"), dtype=dtype).triu_(diagonal=total - length + 2)

        patch(model_module, "lower_right_mask", shifted)


class PositionsRestartAtZero(Faulty):
    @staticmethod
    def plant(patch, run, step):
        forward = DecoderStage.forward
        patch(DecoderStage, "forward", lambda self, inputs, at, context: forward(self, inputs, at - at[0], context))


class RotaryAngleOfPlaceInSlice(Faulty):
    changes: ClassVar = {"position": "rotary"}

    @staticmethod
    def plant(patch, run, step):
        forward = Rotary.forward
        patch(Rotary, "forward", lambda self, inputs, at: forward(self, inputs, at - at[0]))


class LayerSkipped(Faulty):
    @staticmethod
    def plant(patch, run, step):
        forward = Block.forward

        def skipping(self, inputs, positions, context):
            return inputs if self.layer == 2 else forward(self, inputs, positions, context)

        patch(Block, "forward", skipping)


# --- dropout ---------------------------------------------------------------------------------------


class MasksDrawnPerSlice(Faulty):
    """Every slice gets the mask's first rows."""

    changes: ClassVar = {"dropout": 0.1}

    @staticmethod
    def plant(patch, run, step):
        drop = MaskSource.drop
        patch(MaskSource, "drop", lambda self, inputs, start, *place: drop(self, inputs, 0, *place))


def _key_masks(patch: Patch, key: Callable[[int, int, int], tuple[int, int, int]]) -> None:
    init = MaskSource.__init__

    def other_key(self, seed, step, microbatch, seq_tokens, drops=True):
        init(self, *key(seed, step, microbatch), seq_tokens, drops)

    patch(MaskSource, "__init__", other_key)


class MasksDrawnPerRank(Faulty):
    changes: ClassVar = {"dropout": 0.1}

    @staticmethod
    def plant(patch, run, step):
        _key_masks(patch, lambda seed, step, microbatch: (seed + run.mesh.rank, step, microbatch))


class MasksOfFirstMicrobatch(Faulty):
    changes: ClassVar = {"dropout": 0.1}

    @staticmethod
    def plant(patch, run, step):
        _key_masks(patch, lambda seed, step, microbatch: (seed, step, 0))


class MasksOfFirstStep(Faulty):
    changes: ClassVar = {"dropout": 0.1}
    slicing = TWO_STEPS

    @staticmethod
    def plant(patch, run, step):
        _key_masks(patch, lambda seed, step, microbatch: (seed, 0, microbatch))


# --- loss and batch --------------------------------------------------------------------------------


def _scale_loss(patch: Patch, factor: Callable[[torch.Tensor], float]) -> None:
    """The stage divides by the batch's valid tokens afterwards."""
    loss_sum = stage_module.loss_sum
    patch(stage_module, "loss_sum", lambda logits, labels: loss_sum(logits, labels) * factor(labels))


class MeanOfSliceMeans(Faulty):
    @staticmethod
    def plant(patch, run, step):
        slicing = run.spec.slicings[0]
        _scale_loss(patch, lambda labels: slicing.n_tokens / labels.numel() / len(slicing.units))


class LossDividedBySliceTokens(Faulty):
    @staticmethod
    def plant(patch, run, step):
        _scale_loss(patch, lambda labels: run.spec.slicings[0].n_tokens / labels.numel())


class LossDividedByMicrobatchTokens(Faulty):
    @staticmethod
    def plant(patch, run, step):
        slicing = run.spec.slicings[0]
        _scale_loss(patch, lambda labels: slicing.n_tokens / (len(labels) * slicing.seq_tokens))


class BatchOfFirstStep(Faulty):
    slicing = TWO_STEPS

    @staticmethod
    def plant(patch, run, step):
        step_inputs = rank_module.step_inputs
        patch(rank_module, "step_inputs", lambda spec, step: step_inputs(spec, 0)._replace(step=step))


# --- messages --------------------------------------------------------------------------------------


def _swap_slices(patch: Patch, kind: Kind) -> None:
    receive = Mailbox.receive

    def swapped(self, action):
        return receive(self, action._replace(slice=1 - action.slice) if action.kind is kind else action)

    patch(Mailbox, "receive", swapped)


class ActivationOfOtherSlice(Faulty):
    slicing = "[(1, [6, 6])]"

    @staticmethod
    def plant(patch, run, step):
        _swap_slices(patch, Kind.RECV_F)


class GradientOfOtherSlice(Faulty):
    silent = True
    slicing = "[(1, [6, 6])]"

    @staticmethod
    def plant(patch, run, step):
        _swap_slices(patch, Kind.RECV_B)


class MessagesInSinglePrecision(Faulty):
    @staticmethod
    def plant(patch, run, step):
        send = Mailbox.send
        patch(Mailbox, "send", lambda self, action, tensor: send(self, action, tensor.float().double()))


# --- backward in two halves ------------------------------------------------------------------------


class FaultyHalves(Faulty):
    """A fault of a schedule that runs I and W."""

    silent = True
    slicing = "[(1, [6, 6])] * 3"
    schedule = "seq1f1b-zb"


class WeightsOfOneSliceSkipped(FaultyHalves):
    @staticmethod
    def plant(patch, run, step):
        add = WeightQueue.run
        patch(WeightQueue, "run", lambda self, unit: self.products.pop(unit) if unit == (1, 0) else add(self, unit))


class WeightsOfOneSliceTwice(FaultyHalves):
    @staticmethod
    def plant(patch, run, step):
        add = WeightQueue.run

        def twice(self, unit):
            self.products[unit] *= 1 + (unit == (1, 0))
            add(self, unit)

        patch(WeightQueue, "run", twice)


class WeightsOfOtherSlice(FaultyHalves):
    """W runs what another slice has queued; its own is lost."""

    @staticmethod
    def plant(patch, run, step):
        add, kept = WeightQueue.run, {}

        def of_other(self, unit):
            kept.setdefault(id(self), self.products[unit])
            self.products[unit] = kept[id(self)]
            add(self, unit)

        patch(WeightQueue, "run", of_other)


class InputOfOtherSlice(FaultyHalves):
    """An output's gradient meets the input of the slice that was queued before."""

    @staticmethod
    def plant(patch, run, step):
        push, before = WeightQueue.push, {}

        def mixed(self, product):
            own, key = product.inputs, id(product.weight)
            product.inputs = before.get(key, own)
            before[key] = own
            push(self, product)

        patch(WeightQueue, "push", mixed)


class BiasForgotten(FaultyHalves):
    @staticmethod
    def plant(patch, run, step):
        init = Product.__init__
        patch(Product, "__init__", lambda self, inputs, gradient, weight, bias: init(self, inputs, gradient, weight, None))


class HeadLost(FaultyHalves):
    """The product of the tied head, which is no nn.Linear, is queued where nobody runs it."""

    @staticmethod
    def plant(patch, run, step):
        nowhere = WeightQueue()
        nowhere.begin(None)
        patch(model_module, "linear", lambda inputs, weight, queue: linear(inputs, weight, queue=nowhere))


class WeightsOverwritten(FaultyHalves):
    """W puts its product in the place of the sum."""

    @staticmethod
    def plant(patch, run, step):
        add = Product.add

        def overwriting(self):
            self.weight.grad.zero_()
            add(self)

        patch(Product, "add", overwriting)


# --- optimizer -------------------------------------------------------------------------------------


class TiedHalves(Faulty):
    """Each copy of the tied embedding keeps its own part of the gradient."""

    silent = True

    @staticmethod
    def plant(patch, run, step):
        patch(Optimizer, "reduce_shared", lambda self: None)


class SharedGradientTwice(Faulty):
    silent = True

    @staticmethod
    def plant(patch, run, step):
        reduce_shared = Optimizer.reduce_shared
        patch(Optimizer, "reduce_shared", lambda self: (reduce_shared(self), reduce_shared(self)))


class SharedGradientAveraged(Faulty):
    silent = True

    @staticmethod
    def plant(patch, run, step):
        add = Mesh.sum
        patch(Mesh, "sum", lambda self, tensor, ranks=None: add(self, tensor, ranks).div_(len(ranks or "1")))


class GradientsNotCleared(Faulty):
    silent = True
    slicing = TWO_STEPS

    @staticmethod
    def plant(patch, run, step):
        patch(Optimizer, "clear", lambda self: None)


class FaultyUpdate(Faulty):
    """A fault that shows in the parameters after several steps."""

    what = "parameters"


class NormOfOwnRank(FaultyUpdate):
    """Every rank clips by the norm of its own gradients."""

    @staticmethod
    def plant(patch, run, step):
        norm = Optimizer.grad_norm

        def alone(self):
            with mock.patch.object(self.mesh, "sum", lambda tensor, ranks=None: tensor):
                return norm(self)

        patch(Optimizer, "grad_norm", alone)


class TiedCountedTwiceInNorm(FaultyUpdate):
    @staticmethod
    def plant(patch, run, step):
        patch(run.optimizer, "owned", list(run.optimizer.parameters))


class NormBeforeSharedGradientsAreSummed(FaultyUpdate):
    @staticmethod
    def plant(patch, run, step):
        norm, reduce_shared = Optimizer.grad_norm, Optimizer.reduce_shared
        early: list[float] = []
        patch(Optimizer, "reduce_shared", lambda self: (early.append(norm(self)), reduce_shared(self)))
        patch(Optimizer, "grad_norm", lambda self: early.pop())


class OneRankDoesNotClip(FaultyUpdate):
    @staticmethod
    def plant(patch, run, step):
        patch(run.optimizer, "clip_grad_norm", None if run.mesh.rank == 1 else run.optimizer.clip_grad_norm)


class OneRankSkipsOneUpdate(FaultyUpdate):
    @staticmethod
    def plant(patch, run, step):
        if (run.mesh.rank, step) == (1, 1):
            patch(run.optimizer.adam, "step", lambda: None)


class GradientsAddUpOverSteps(FaultyUpdate):
    @staticmethod
    def plant(patch, run, step):
        patch(Optimizer, "clear", lambda self: None)


class TiedCopiesDriftApart(FaultyUpdate):
    @staticmethod
    def plant(patch, run, step):
        patch(Optimizer, "reduce_shared", lambda self: None)


BASES = (Faulty, FaultyHalves, FaultyUpdate)
FAULTS = {kind.__name__: kind for base in BASES for kind in base.__subclasses__() if kind not in BASES}


def _arm() -> None:
    """Have every step of a run with a faulty stage run with its fault planted."""
    run_step = RankRun.run_step

    def run_faulty_step(self, step, save=None):
        module, _, name = str(self.spec.stage).partition(":")
        with ExitStack() as planted:
            if module == __name__:
                patch = lambda owner, name, new: planted.enter_context(mock.patch.object(owner, name, new))  # noqa: E731
                FAULTS[name].plant(patch, self, step)
            run_step(self, step, save)

    RankRun.run_step = run_faulty_step


if ENVIRONMENT in os.environ:  # in a rank
    _arm()
