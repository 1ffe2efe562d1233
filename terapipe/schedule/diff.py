"""The difference of two schedules: the actions that moved, and those only one of them has.

On each rank, what stands in the same order in both counts as unmoved: as many actions as possible
(the longest increasing run of places, by patience sorting). So one moved action is one change,
though all behind it have other steps.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from terapipe.schedule.action import Action
from terapipe.schedule.grid import Cell

if TYPE_CHECKING:
    import pandas as pd

Orders = Sequence[Sequence[Action]]


class Change(NamedTuple):
    """An action with its (rank, step) in either schedule; None where it is not there."""

    action: Action
    here: Cell | None
    there: Cell | None

    def __str__(self) -> str:
        if self.here is None or self.there is None:
            (rank, step), which = (self.here, "here") if self.here is not None else (self.there or (-1, -1), "there")
            return f"rank {rank}: {self.action} only {which}, at step {step}"
        (rank, step), (other, place) = self.here, self.there
        return f"rank {rank}: {self.action} moved from step {step} to step {place}" + (f" of rank {other}" * (other != rank))


@dataclass(frozen=True)
class ScheduleDiff:
    """What differs between a schedule, here, and another, there. Prints as one line a difference.

    Attributes
    ----------
    changes : tuple of Change
        By rank and step; as few as tell the whole difference of the orders.
    names, slicings : pair of str
        Here and there.
    """

    changes: tuple[Change, ...]
    names: tuple[str, str]
    slicings: tuple[str, str]

    @property
    def is_empty(self) -> bool:
        """Whether orders and slicing are the same; names may differ."""
        return not self.changes and self.slicings[0] == self.slicings[1]

    @property
    def frame(self) -> "pd.DataFrame":
        """One row a change: action, change ("moved", "only here", "only there"), rank, step, rank_there, step_there."""
        import pandas as pd

        rows = []
        for action, here, there in self.changes:
            change = "only there" if here is None else "only here" if there is None else "moved"
            rows.append((str(action), change, *(here or (pd.NA, pd.NA)), *(there or (pd.NA, pd.NA))))
        numbers = ["rank", "step", "rank_there", "step_there"]
        return pd.DataFrame(rows, columns=["action", "change", *numbers]).astype(dict.fromkeys(numbers, "Int64"))

    def __str__(self) -> str:
        lines = [
            f"{what}: {here} here, {there} there"
            for what, (here, there) in (("name", self.names), ("slicing", self.slicings))
            if here != there
        ]
        return "\n".join([*lines, *map(str, self.changes)] if not self.is_empty else [*lines, "the same orders and slicing"])

    def __repr__(self) -> str:
        return str(self)


def compare_orders(here: Orders, there: Orders) -> tuple[Change, ...]:
    """The changes from one schedule's orders to another's, by rank and step."""
    cells, others = _cells(here), _cells(there)
    unmoved: set[tuple[Action, int]] = set()
    for rank, order in enumerate(_by_rank(cells, len(here))):
        kept = [key for key in order if others.get(key, (-1, -1))[0] == rank]
        longest = _increasing([others[key][1] for key in kept])
        unmoved |= {kept[place] for place in longest}
    changes = [Change(key[0], cell, others.get(key)) for key, cell in cells.items() if key not in unmoved]
    changes += [Change(key[0], None, cell) for key, cell in others.items() if key not in cells]
    return tuple(sorted(changes, key=lambda change: change.here or change.there or (-1, -1)))


def _cells(orders: Orders) -> dict[tuple[Action, int], Cell]:
    """(action, how many of it stood before) → (rank, step): an invalid schedule may repeat an action."""
    seen: Counter[Action] = Counter()
    cells = {}
    for rank, order in enumerate(orders):
        for step, action in enumerate(order):
            cells[action, seen[action]] = (rank, step)
            seen[action] += 1
    return cells


def _by_rank(cells: dict[tuple[Action, int], Cell], n_ranks: int) -> list[list[tuple[Action, int]]]:
    orders: list[list[tuple[Action, int]]] = [[] for _ in range(n_ranks)]
    for key, (rank, _) in cells.items():
        orders[rank].append(key)
    return orders


def _increasing(values: Sequence[int]) -> list[int]:
    """Places of a longest increasing subsequence of distinct numbers, in O(n log n)."""
    ends: list[int] = []  # the smallest value that ends an increasing run of each length
    places: list[int] = []  # and its place
    before: list[int] = []  # the place before each one, in the longest run that it ends
    for place, value in enumerate(values):
        length = bisect_left(ends, value)
        before.append(places[length - 1] if length else -1)
        if length == len(ends):
            ends.append(value)
            places.append(place)
        else:
            ends[length], places[length] = value, place
    run = []
    place = places[-1] if places else -1
    while place >= 0:
        run.append(place)
        place = before[place]
    return run[::-1]
