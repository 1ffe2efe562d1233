"""Actions that wait for each other: whether there are any, the shortest cycle of them, and the move that repairs it.

It knows the order of each rank and what every action needs; never costs, and no action by name until
an error is written. Actions are flat indices, those of `Graph`, so the later of two actions on one
rank has the larger index. An action starts after the one before it on its rank and after those that
it needs; only the neighbouring stage's can be on another rank:

    rank 0   0F0  0B0* 0F1  0B1       0B0 waits for 1B0, which stands behind 1F1;
    rank 1   1F0  1F1* 1B0  1B1       1F1 waits for 0F1, which stands behind 0B0: a cycle of two ranks

A cycle holds a rank's waiting action, its needed one and the order between them. So a move of one
action breaks it only if it moves one of these two: they are all that a repair has to try.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from terapipe.errors import DeadlockError
from terapipe.schedule.action import Action
from terapipe.schedule.graph import NEIGHBOUR_STAGE, Indices
from terapipe.schedule.grid import Cell, format_around

Orders = Sequence[Sequence[Action]]
Wait = tuple[int, int]  # (waiting action, the action it needs)
Move = tuple[int, int]  # (action, the index of its new place)
Furthest = dict[int, Indices]  # rank → the largest index reached on it, −1 for none; an entry a start


def check_progress(orders: Orders, rank: Indices, dependencies: Indices) -> None:
    """Refuse orders in which some action can never start.

    Parameters
    ----------
    orders
        What each rank runs, for the message.
    rank, dependencies : integer arrays (n_actions,), (n_actions, 3)
        Those of `Graph`, of a complete schedule.

    Raises
    ------
    DeadlockError
        With the shortest cycle of actions that wait for each other, and the shortest move of one
        action that makes the whole schedule valid, where there is one.
    """
    wrong = _find_wrong_order(rank, dependencies)
    if wrong is None and _is_finishing(rank, dependencies):
        return
    cycle = [wrong] if wrong is not None else _Needs(rank, dependencies[:, NEIGHBOUR_STAGE]).shortest_cycle()
    raise _describe(orders, rank, cycle, _find_repair(rank, dependencies, cycle))


def _find_wrong_order(rank: Indices, dependencies: Indices) -> Wait | None:
    """An action that stands before one of its own rank that it needs."""
    indices = np.arange(len(rank))
    for needed in dependencies.T:
        wrong = np.flatnonzero((needed > indices) & (rank[needed] == rank))
        if len(wrong):
            return int(wrong[0]), int(needed[wrong[0]])
    return None


def _is_finishing(rank: Indices, dependencies: Indices) -> bool:
    """Run orders that are right on each rank, without times: does every rank reach its end?"""
    needed = dependencies[:, NEIGHBOUR_STAGE]
    needs: list[int] = needed.tolist()
    ends: list[int] = np.cumsum(np.bincount(rank)).tolist()
    heads = [0, *ends][:-1]
    done = bytearray(len(needs) + 1)
    done[-1] = 1  # "needs nothing" is index −1: always done
    asleep: dict[int, int] = {}  # the action that a rank waits for → the rank
    awake = list(range(len(ends)))
    while awake:
        this = awake.pop()
        end = ends[this]
        for index in range(heads[this], end):
            if not done[needs[index]]:
                asleep[needs[index]] = this
                heads[this] = index
                break
            done[index] = 1
            if index in asleep:
                awake.append(asleep.pop(index))
        else:
            heads[this] = end
    return heads == ends


class _Needs:
    """What the actions of one rank, up to any one of them, need furthest on each other rank.

    `tables[s][t][p]`: the largest index on rank t that is needed by the first p + 1 actions of rank
    s, −1 for none. It never falls with p: whoever comes after an action comes after all before it.
    """

    def __init__(self, rank: Indices, needed: Indices) -> None:
        n_ranks = int(rank[-1]) + 1
        self.bounds: list[int] = np.searchsorted(rank, np.arange(n_ranks + 1)).tolist()
        homes = np.where((needed >= 0) & (rank[needed] != rank), rank[needed], -1)
        self.tables: list[dict[int, Indices]] = []
        for start, end in pairwise(self.bounds):
            home, need = homes[start:end], needed[start:end]
            others = [int(other) for other in np.unique(home) if other >= 0]
            self.tables.append({other: np.maximum.accumulate(np.where(home == other, need, -1)) for other in others})

    def shortest_cycle(self) -> list[Wait]:
        """The waits of the fewest ranks that close a cycle; the earliest of those. There must be one.

        From every action at once: which are the furthest actions that it comes after, by one message,
        by two, …, until some action comes after itself.
        """
        n_ranks = len(self.tables)
        starts = [np.arange(start, end) for start, end in pairwise(self.bounds)]
        reached: list[Furthest] = [{rank: starts[rank]} for rank in range(n_ranks)]
        for n_waits in range(1, n_ranks + 1):
            closed: list[tuple[int, int]] = []  # (step, rank) of a rank's first action that comes after itself
            for rank, start in enumerate(starts):
                reached[rank] = self._hop(reached[rank])
                after_itself = np.flatnonzero(reached[rank].get(rank, start - 1) >= start)
                closed += [(int(after_itself[0]), rank)] if len(after_itself) else []
            if closed:
                step, rank = min(closed)
                return self._trace(rank, self.bounds[rank] + step, n_waits)
        raise AssertionError("no cycle in orders that cannot finish")

    def _hop(self, reached: Furthest) -> Furthest:
        """One message further than the furthest actions reached on each rank."""
        further: Furthest = {}
        for rank, furthest in reached.items():
            places = np.maximum(furthest - self.bounds[rank], 0)
            for other, table in self.tables[rank].items():
                found = np.where(furthest >= 0, table[places], -1)
                further[other] = np.maximum(further[other], found) if other in further else found
        return further

    def _trace(self, rank: int, start: int, n_waits: int) -> list[Wait]:
        """The cycle of `n_waits` waits through an action that comes after itself; the wait of its own rank first."""
        path: list[Furthest] = [{rank: np.array([start])}]
        for _ in range(n_waits - 1):
            path.append(self._hop(path[-1]))
        waits: list[Wait] = []
        behind = start  # the next wait found is for this one, or one after it on the same rank
        for reached in reversed(path):
            found = {other: self._first_needing(other, rank, behind) for other in sorted(reached)}
            rank = next(other for other, (waiting, _) in found.items() if waiting <= reached[other][0])
            waits.insert(0, found[rank])
            behind = found[rank][0]
        return waits

    def _first_needing(self, rank: int, other: int, behind: int) -> Wait:
        """The first action of `rank` that needs one of `other` at or behind an index, with that one; past the end: none."""
        table = self.tables[rank].get(other, np.empty(0, dtype=np.int64))
        place = int(np.searchsorted(table, behind))
        return (self.bounds[rank] + place, int(table[place])) if place < len(table) else (self.bounds[-1], -1)

    def furthest_before(self, actions: Iterable[int]) -> list[int]:
        """The largest index on each rank among some actions and all that come before them; −1 for none."""
        furthest = [-1] * len(self.tables)
        found = list(actions)
        while found:
            action = found.pop()
            rank = bisect_right(self.bounds, action) - 1
            if action > furthest[rank]:
                furthest[rank] = action
                needs = [int(table[action - self.bounds[rank]]) for table in self.tables[rank].values()]
                found += [need for need in needs if need >= 0]
        return furthest


def _find_repair(rank: Indices, dependencies: Indices, cycle: Sequence[Wait]) -> Move | None:
    """The shortest move of one action by which all can run; None where no move of a single one does.

    Rid of its own place in the order, an action may stand anywhere behind all that it comes after and
    before all that comes after it. Of its moves, that to the nearest such place is tried.
    """
    n, needed = len(rank), dependencies[:, NEIGHBOUR_STAGE]
    needing = np.full(n, -1)
    needing[needed[needed >= 0]] = np.flatnonzero(needed >= 0)
    before = _Needs(rank, needed)
    after = _Needs(rank[-1] - rank[::-1], np.where(needing >= 0, n - 1 - needing, -1)[::-1])  # the order read backwards
    moves = []
    for action in sorted({action for wait in cycle for action in wait}):
        own, needs = int(rank[action]), dependencies[action]
        last_before = before.furthest_before(needs[needs >= 0].tolist())[own]
        needy = np.flatnonzero((dependencies == action).any(axis=1))
        first_after = n - 1 - after.furthest_before((n - 1 - needy).tolist())[int(rank[-1]) - own]
        if (last_before > action) != (first_after < action):  # both: it would come after itself wherever it stood
            moves.append((action, last_before if last_before > action else first_after))
    for action, place in sorted(moves, key=lambda move: abs(move[1] - move[0])):
        moved = _move(dependencies, action, place)
        if _find_wrong_order(rank, moved) is None and _is_finishing(rank, moved):
            return action, place
    return None


def _move(dependencies: Indices, action: int, place: int) -> Indices:
    """The dependencies, by the new indices, after a move of one action to another place of its rank."""
    sequence = np.insert(np.delete(np.arange(len(dependencies)), action), place, action)
    index = np.empty_like(sequence)
    index[sequence] = np.arange(len(sequence))
    moved: Indices = np.where(dependencies >= 0, index[dependencies], -1)[sequence]
    return moved


def _describe(orders: Orders, rank: Indices, cycle: Sequence[Wait], repair: Move | None) -> DeadlockError:
    """The error: what waits for what, the move that repairs it, and the grid with the waiting actions marked."""
    cells = [(_cell(rank, waiting), _cell(rank, needed)) for waiting, needed in cycle]
    named = tuple((waiting[0], _name(orders, waiting), _name(orders, needed)) for waiting, needed in cells)
    if len(cycle) == 1:
        (home, waiting, needed), ((_, step), (_, later)) = named[0], cells[0]
        story = f"wrong order on rank {home}: {waiting} at step {step} needs {needed}, which stands after it at step {later}."
    else:
        story = "; ".join(f"rank {home} waits at {waiting} for {needed}" for home, waiting, needed in named)
        why = "Each of these is, or stands behind, the waiting action of its own rank, so none can ever start."
        story = f"deadlock: {story}. {why}"
    advice, move = "No move of a single action repairs it.", None
    if repair is not None:
        (home, step), name = _cell(rank, repair[1]), _name(orders, _cell(rank, repair[0]))
        advice, move = f"Moving {name} to step {step} of rank {home} repairs it.", (name, step)
    grid = format_around(orders, [waiting for waiting, _ in cells])
    return DeadlockError(f"{story} {advice}\n{grid}", named, move)


def _cell(rank: Indices, index: int) -> Cell:
    home = int(rank[index])
    return home, index - int(np.searchsorted(rank, home))


def _name(orders: Orders, cell: Cell) -> str:
    return str(orders[cell[0]][cell[1]])
