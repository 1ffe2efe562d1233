"""The paper's notation for slicings, "[(1, [776, 640, 632])] * 16", read and written.

    slicing    = microbatch list { "+" microbatch list }
    …list      = "[" item { "," item } "]" [ "*" count ]
    microbatch = "(" sequences "," lengths ")"
    lengths    = length list { "+" length list }

A grammar of its own: text from a file is never evaluated as Python.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

from terapipe.errors import SlicingError

Item = TypeVar("Item")
Microbatch = tuple[int, tuple[int, ...]]
MAX_SLICES = 1_000_000  # of all microbatches: a typing error such as "* 1000000000" must not fill the memory
_MAX_DIGITS = 18

_TOKEN = re.compile(r"\s*(\d+|[\[\](),*+])")


def parse_slicing(text: str) -> list[Microbatch]:
    """Microbatches as (n_sequences, slice lengths); lengths are not judged here.

    Raises
    ------
    SlicingError
        Where `text` does not follow the grammar, with the place marked.
    """
    return _Reader(text).whole()


def format_slicing(microbatches: Sequence[Microbatch]) -> str:
    """Shortest text that `parse_slicing` reads back to the same microbatches."""
    return _format(microbatches, lambda each: f"({each[0]}, {_format(each[1], str, least_run=3)})", least_run=2)


def _format(items: Sequence[Item], show: Callable[[Item], str], least_run: int) -> str:
    """Runs of at least `least_run` equal items as "[x] * n", everything between them in one list."""
    parts: list[str] = []
    plain: list[str] = []
    for item, run in groupby(items):
        n = len(list(run))
        if n < least_run:
            plain += [show(item)] * n
            continue
        if plain:
            parts.append(f"[{', '.join(plain)}]")
            plain = []
        parts.append(f"[{show(item)}] * {n}")
    if plain:
        parts.append(f"[{', '.join(plain)}]")
    return " + ".join(parts)


class _Reader:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, int]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(at + len(text[at:]) - len(text[at:].lstrip()), "a number or one of [ ] ( ) , * +")
            self.tokens.append((match[1], match.start(1)))
            at = match.end()
        self.next = 0

    def whole(self) -> list[Microbatch]:
        """The text as a slicing, to its last token."""
        microbatches = self._terms(self._microbatch)
        if self.next < len(self.tokens):
            raise self._error(self.tokens[self.next][1], "the end, '+' or '*'")
        return microbatches

    def _terms(self, item: Callable[[], Item]) -> list[Item]:
        items = self._list(item)
        while self._accept("+"):
            items += self._list(item)
        return items

    def _list(self, item: Callable[[], Item]) -> list[Item]:
        self._expect("[")
        items = [item()]
        while self._accept(","):
            items.append(item())
        self._expect("]")
        times = self._number() if self._accept("*") else 1
        n_slices = sum(len(item[1]) if isinstance(item, tuple) else 1 for item in items)
        if times * n_slices > MAX_SLICES:
            raise self._error(self.tokens[self.next - 1][1], f"at most {MAX_SLICES} slices")
        return items * times

    def _microbatch(self) -> Microbatch:
        self._expect("(")
        n_sequences = self._number()
        self._expect(",")
        lengths = tuple(self._terms(self._number))
        self._expect(")")
        return n_sequences, lengths

    def _number(self) -> int:
        text = self.tokens[self.next][0] if self.next < len(self.tokens) else ""
        if not text.isdigit() or len(text) > _MAX_DIGITS:
            raise self._error(self._position(), f"a whole number of at most {_MAX_DIGITS} digits")
        self.next += 1
        return int(text)

    def _accept(self, symbol: str) -> bool:
        found = self.next < len(self.tokens) and self.tokens[self.next][0] == symbol
        self.next += found
        return found

    def _expect(self, symbol: str) -> None:
        if not self._accept(symbol):
            raise self._error(self._position(), repr(symbol))

    def _position(self) -> int:
        return self.tokens[self.next][1] if self.next < len(self.tokens) else len(self.text)

    def _error(self, position: int, expected: str) -> SlicingError:
        return SlicingError(
            f"{self.text!r} is not a slicing: {expected} is expected at character {position}.\n"
            f"    {self.text}\n    {' ' * position}^\n"
            'A slicing reads like "[(1, [776, 640, 632])] * 16": 16 microbatches of 1 sequence, cut into three slices.'
        )
