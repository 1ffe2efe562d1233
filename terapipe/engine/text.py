"""Real text as tokens: one byte a token, labels are the next token. No download, no tokenizer."""

from functools import lru_cache
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import numpy as np
import torch

from terapipe.errors import SpecError
from terapipe.slicing import Slicing

IGNORED = -100  # a label that does not count, as in torch.nn.functional.cross_entropy


class Batch(NamedTuple):
    """Tokens and labels of a step, a tensor (B, L) for each microbatch; labels of −100 do not count."""

    tokens: list[torch.Tensor]
    labels: list[torch.Tensor]

    @property
    def n_valid(self) -> int:
        """Labels that count, over all microbatches: what the loss is divided by."""
        return sum(int((labels != IGNORED).sum()) for labels in self.labels)


def read_tokens(path: str | None, vocab_size: int) -> torch.Tensor:
    """The text's bytes modulo `vocab_size`; None reads the help topics that Python ships, half a megabyte of English."""
    if path is None:
        return _read(None, vocab_size, (0, 0))
    file = Path(path).stat()
    return _read(path, vocab_size, (file.st_mtime_ns, file.st_size))  # a file that changed is read again


@lru_cache(maxsize=2)
def _read(path: str | None, vocab_size: int, version: tuple[int, int]) -> torch.Tensor:
    raw = "\n".join(topics.topics.values()).encode() if path is None else Path(path).read_bytes()
    if not raw:
        raise SpecError(f"text={path!r} is empty; training needs at least one byte.")
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).astype(np.int64) % vocab_size)


def read_batch(path: str | None, vocab_size: int, slicing: Slicing, step: int) -> Batch:
    """The step-th batch: consecutive windows of the text, starting over at its end."""
    text, length = read_tokens(path, vocab_size), slicing.seq_tokens
    windows = (step * slicing.n_sequences + torch.arange(slicing.n_sequences)) * length
    rows = text[(windows[:, None] + torch.arange(length + 1)) % len(text)]
    sizes = [each.n_sequences for each in slicing.microbatches]
    return Batch(list(rows[:, :-1].split(sizes)), list(rows[:, 1:].split(sizes)))
