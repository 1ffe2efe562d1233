"""The bytes that one rank really holds, storage by storage, once each action has ended.

While an action runs, hooks on autograd see every tensor that it saves for a backward; one is let go of
where autograd drops it. A storage counts once, however many tensors share it. Beside those the
ledger counts what the stages keep themselves: buffers of keys and values, dropout masks, inputs and
outputs of units, weight queues, parameters. It does not count the batch, the attention masks that all
units share, gradients of parameters, or what an action needs only while it runs.

Counting takes time, between actions and in them: times measured beside it are not for comparing.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from terapipe.engine.model import cached_masks
from terapipe.engine.stage import Stage

Storages = dict[int, int]  # bytes by address


class _Saved:
    """A tensor that autograd saved; the entry of its storage is closed when autograd drops the last one of it."""

    __slots__ = ("ledger", "tensor")

    def __init__(self, ledger: "Ledger", tensor: torch.Tensor) -> None:
        self.ledger, self.tensor = ledger, tensor
        address = tensor.untyped_storage().data_ptr()
        ledger.n_saved[address] = ledger.n_saved.get(address, 0) + 1
        ledger.saved[address] = tensor.untyped_storage().nbytes()

    def __del__(self) -> None:
        address = self.tensor.untyped_storage().data_ptr()
        self.ledger.n_saved[address] -= 1
        if self.ledger.n_saved[address] == 0:
            del self.ledger.n_saved[address], self.ledger.saved[address]


class Ledger:
    """What a rank's stages hold.

    Attributes
    ----------
    rows : list
        One an action since they were last taken: units, activation_bytes, context_bytes, queue_bytes,
        weight_bytes, total_bytes.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self.stages = list(stages)
        self.n_saved: dict[int, int] = {}
        self.saved: Storages = {}
        self.rows: list[tuple[int, ...]] = []

    def take_rows(self) -> list[tuple[int, ...]]:
        """The rows, which the ledger forgets."""
        rows, self.rows = self.rows, []
        return rows

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See what autograd saves while an action runs.

        Saved is the tensor itself, so nothing is copied and gradients stay what they are. Autograd does
        not check tensors behind hooks for changes in place; runs without a ledger do.
        """
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(self, tensor), lambda saved: saved.tensor):
            yield

    def record(self) -> None:
        """Add the row of an action that has just ended."""
        weights = _storages(parameter for stage in self.stages for parameter in stage.module.parameters())
        standing = weights.keys() | _storages(self._batch()).keys() | _storages(cached_masks.values()).keys()
        contexts = _storages(self._contexts())
        kept = _storages(tensor for stage in self.stages for unit in stage.kept.values() for tensor in unit)
        activations = _without(self.saved | kept, standing | contexts.keys())
        queued = _without(_storages(self._queued()), standing | contexts.keys() | activations.keys())
        parts = [sum(each.values()) for each in (activations, contexts, queued, weights)]
        self.rows.append((self._n_units(), *parts, sum(parts)))

    def _n_units(self) -> int:
        """Units whose forward is done and whose backward, or W, is not."""
        queues = [stage.weight_queue for stage in self.stages if stage.weight_queue is not None]
        return sum(len(stage.kept) for stage in self.stages) + sum(len(queue.products) for queue in queues)

    def _batch(self) -> Iterator[torch.Tensor]:
        for stage in self.stages:
            yield from (*stage.inputs.tokens, *stage.inputs.labels)

    def _contexts(self) -> Iterator[torch.Tensor]:
        for stage in self.stages:
            for microbatch in stage.contexts.values():
                for buffer in microbatch.buffers.values():
                    yield from (buffer.rows, buffer.gradient)
                yield from microbatch.masks.masks.values()

    def _queued(self) -> Iterator[torch.Tensor]:
        for stage in self.stages:
            for products in stage.weight_queue.products.values() if stage.weight_queue is not None else ():
                for product in products:
                    yield from product.kept


def _storages(tensors: Iterable[torch.Tensor]) -> Storages:
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def _without(storages: Storages, others: set[int]) -> Storages:
    return {address: n_bytes for address, n_bytes in storages.items() if address not in others}
