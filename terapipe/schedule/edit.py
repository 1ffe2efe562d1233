"""Edits of typed orders: move, swap, insert and remove actions. Pure functions; whether the result can run is not asked.

A step is a place in a rank's order, from 0. Each function returns new orders and leaves the given
ones as they are.
"""

from collections.abc import Sequence

from terapipe.errors import ScheduleError, check_integer
from terapipe.schedule.action import Action
from terapipe.schedule.grid import Cell, format_around

Orders = tuple[tuple[Action, ...], ...]


def move(orders: Orders, action: Action, step: int) -> Orders:
    """The action at another step of its rank; those between shift by one."""
    rank, place = find(orders, action)
    last = len(orders[rank]) - 1
    step = check_integer("step", step, 0, ScheduleError)
    if step > last:
        raise ScheduleError(f"step={step}: {action} is on rank {rank}, whose steps are 0…{last}.")
    order = list(orders[rank])
    order.insert(step, order.pop(place))
    return _replaced(orders, rank, order)


def swap(orders: Orders, first: Action, second: Action) -> Orders:
    """Two actions of one rank in each other's place."""
    (rank, here), (other, there) = find(orders, first), find(orders, second)
    if rank != other:
        raise ScheduleError(
            f"{first} is on rank {rank} and {second} on rank {other}; only actions of one rank swap, as a stage lives on "
            f"exactly one.\n{format_around(orders, [(rank, here), (other, there)])}"
        )
    order = list(orders[rank])
    order[here], order[there] = order[there], order[here]
    return _replaced(orders, rank, order)


def insert(orders: Orders, rank: int, step: int, action: Action) -> Orders:
    """One more action at a step of a rank; those from there on shift by one."""
    rank, step = check_integer("rank", rank, 0, ScheduleError), check_integer("step", step, 0, ScheduleError)
    if rank >= len(orders):
        raise ScheduleError(f"rank={rank}: the schedule has ranks 0…{len(orders) - 1}. Type more with Schedule.from_orders.")
    order = list(orders[rank])
    if step > len(order):
        raise ScheduleError(f"step={step}: on rank {rank} an action can be inserted at steps 0…{len(order)}.")
    order.insert(step, action)
    return _replaced(orders, rank, order)


def remove(orders: Orders, action: Action) -> Orders:
    """The orders without an action; those behind it shift by one."""
    rank, place = find(orders, action)
    if len(orders[rank]) == 1:
        raise ScheduleError(f"{action} is all that rank {rank} runs; every rank runs at least one stage.")
    return _replaced(orders, rank, [*orders[rank][:place], *orders[rank][place + 1 :]])


def find(orders: Orders, action: Action) -> Cell:
    """(rank, step) of an action.

    Raises
    ------
    ScheduleError
        Where it is absent, or there more than once.
    """
    cells = [(rank, step) for rank, order in enumerate(orders) for step, each in enumerate(order) if each == action]
    if not cells:
        raise ScheduleError(f"{action} is not in the schedule.{_near(orders, action)}")
    if len(cells) > 1:
        places = ", ".join(f"step {step} of rank {rank}" for rank, step in cells)
        raise ScheduleError(
            f"{action} is there {len(cells)} times, at {places}, so it is not clear which is meant. Start from the schedule "
            f"before it was repeated, or type the orders with Schedule.from_orders.\n{format_around(orders, cells)}"
        )
    return cells[0]


def _near(orders: Orders, action: Action) -> str:
    """What is there of the same slice, for a message."""
    same = [str(each) for order in orders for each in order if each[2:] == action[2:]]
    unit = f"microbatch {action.microbatch}, slice {action.slice}"
    return (
        f" Of {unit} it has {', '.join(same[:12])}{'…' if len(same) > 12 else ''}." if same else f" It has nothing of {unit}."
    )


def _replaced(orders: Orders, rank: int, order: Sequence[Action]) -> Orders:
    return (*orders[:rank], tuple(order), *orders[rank + 1 :])
