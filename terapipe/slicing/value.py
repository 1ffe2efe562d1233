"""A slicing: the ordered slice lengths of every microbatch. Knows tokens only, no costs or ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from terapipe.errors import SlicingError, check_integer
from terapipe.slicing.notation import format_slicing, parse_slicing


@dataclass(frozen=True)
class MicrobatchSlices:
    """One microbatch: `n_sequences` sequences, cut alike into slices of `slice_tokens` tokens."""

    n_sequences: int
    slice_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.n_sequences == 0:
            raise SlicingError("a microbatch of 0 sequences; it needs at least 1.")
        object.__setattr__(self, "n_sequences", check_integer("n_sequences", self.n_sequences, 1, SlicingError))
        if not isinstance(self.slice_tokens, Iterable):
            raise SlicingError(f"slice_tokens={self.slice_tokens!r}: needs the lengths of the slices, e.g. (776, 640, 632).")
        lengths = tuple(check_integer("slice_tokens", length, 0, SlicingError) for length in self.slice_tokens)
        if not lengths:
            raise SlicingError("a microbatch without slices; it needs at least one slice.")
        if 0 in lengths:
            raise SlicingError(
                f"slice {lengths.index(0)} of {list(lengths)} has 0 tokens; a slice needs at least 1. Leave it out."
            )
        object.__setattr__(self, "slice_tokens", lengths)

    @property
    def n_slices(self) -> int:
        """Number of slices."""
        return len(self.slice_tokens)

    @cached_property
    def context_tokens(self) -> tuple[int, ...]:
        """Tokens before each slice."""
        return tuple(int(end) for end in np.cumsum((0, *self.slice_tokens[:-1])))


@dataclass(frozen=True)
class Slicing:
    """The ordered list of microbatches and their slice lengths; every microbatch has the same tokens.

    `str(slicing)` is the paper's notation and `Slicing.parse` reads it back.

    Examples
    --------
    >>> slicing = Slicing.parse("[(1, [120] * 4 + [112] * 6)] * 2")
    >>> slicing.n_microbatches, slicing.seq_tokens, slicing.microbatches[0].n_slices
    (2, 1152, 10)
    >>> str(slicing)
    '[(1, [120] * 4 + [112] * 6)] * 2'
    """

    microbatches: tuple[MicrobatchSlices, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "microbatches", tuple(self.microbatches))
        if not self.microbatches:
            raise SlicingError("a slicing without microbatches; it needs at least one.")
        totals = [sum(microbatch.slice_tokens) for microbatch in self.microbatches]
        for index, total in enumerate(totals):
            if total != totals[0]:
                raise SlicingError(
                    f"microbatch {index} has {total} tokens, microbatch 0 has {totals[0]}: all must have the same. "
                    f"{list(self.microbatches[index].slice_tokens)} against {list(self.microbatches[0].slice_tokens)}."
                )

    @classmethod
    def parse(cls, text: str) -> "Slicing":
        """Read the paper's notation; `SlicingError` with the place marked where it is not one."""
        if not isinstance(text, str):
            raise SlicingError(f"{text!r} is not text; Slicing.parse reads notation like '[(1, [776, 640, 632])] * 16'.")
        return cls(tuple(MicrobatchSlices(n, lengths) for n, lengths in parse_slicing(text)))

    def __str__(self) -> str:
        return format_slicing([(each.n_sequences, each.slice_tokens) for each in self.microbatches])

    def __repr__(self) -> str:
        return f"Slicing.parse({str(self)!r})"

    @property
    def seq_tokens(self) -> int:
        """Tokens of one sequence."""
        return sum(self.microbatches[0].slice_tokens)

    @property
    def n_microbatches(self) -> int:
        """Number of microbatches in a step."""
        return len(self.microbatches)

    @property
    def n_sequences(self) -> int:
        """Sequences of all microbatches: the batch of a step."""
        return sum(each.n_sequences for each in self.microbatches)

    @property
    def n_tokens(self) -> int:
        """Tokens of a step."""
        return self.n_sequences * self.seq_tokens

    @property
    def is_whole(self) -> bool:
        """Whether every microbatch is one slice."""
        return all(each.n_slices == 1 for each in self.microbatches)

    @cached_property
    def units(self) -> npt.NDArray[np.int64]:
        """One row a (microbatch, slice), going forward.

        Columns: microbatch, slice, slice_tokens, context_tokens, n_sequences.
        """
        return np.array(
            [
                (index, place, length, context, each.n_sequences)
                for index, each in enumerate(self.microbatches)
                for place, (length, context) in enumerate(zip(each.slice_tokens, each.context_tokens, strict=True))
            ],
            dtype=np.int64,
        )

    @cached_property
    def first_units(self) -> tuple[int, ...]:
        """Row in `units` of every microbatch's slice 0."""
        return tuple(int(start) for start in np.cumsum([0] + [each.n_slices for each in self.microbatches[:-1]]))


def uniform_slicing(seq_tokens: int, n_slices: int, n_microbatches: int = 1, n_sequences: int = 1) -> Slicing:
    """Equal slices: lengths differ by at most one token, longer ones first.

    Parameters
    ----------
    seq_tokens, n_slices : int
        Tokens of a sequence, and slices it is cut into.
    n_microbatches, n_sequences : int
        Microbatches in a step, and sequences in each.

    Raises
    ------
    SlicingError
        For sizes below 1, or more slices than tokens.
    """
    check_cut(seq_tokens, n_slices, n_microbatches, n_sequences)
    whole, rest = divmod(seq_tokens, n_slices)
    lengths = tuple(whole + (index < rest) for index in range(n_slices))
    return Slicing((MicrobatchSlices(n_sequences, lengths),) * n_microbatches)


def check_cut(seq_tokens: int, n_slices: int, n_microbatches: int, n_sequences: int) -> None:
    """Refuse sizes below 1, and more slices than tokens."""
    sizes = {"seq_tokens": seq_tokens, "n_slices": n_slices, "n_microbatches": n_microbatches, "n_sequences": n_sequences}
    for name, value in sizes.items():
        check_integer(name, value, 1, SlicingError)
    if n_slices > seq_tokens:
        raise SlicingError(f"{n_slices} slices of {seq_tokens} tokens: a slice needs a token. Use at most {seq_tokens} slices.")
