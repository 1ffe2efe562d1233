"""Whether a schedule is complete: every action there once, each on a slice that exists. `deadlock` says if it can run.

Every error quotes the action, says what is wrong, and shows the step × rank grid with the cell
marked.
"""

from collections.abc import Sequence

import numpy as np

from terapipe.errors import ScheduleError
from terapipe.schedule.action import Action
from terapipe.schedule.deadlock import check_progress
from terapipe.schedule.graph import (
    B_CODE,
    F_CODE,
    I_CODE,
    KINDS,
    W_CODE,
    Graph,
    Indices,
    find_dependencies,
    find_positions,
    index_actions,
)
from terapipe.schedule.grid import Cell, format_around
from terapipe.slicing import Slicing

Orders = Sequence[Sequence[Action]]


def validate(orders: tuple[tuple[Action, ...], ...], slicing: Slicing, stage_to_rank: tuple[int, ...]) -> Graph:
    """Check the orders; return them as a `Graph`.

    Raises
    ------
    ScheduleError
        For an action that names no slice, is missing or repeated.
    DeadlockError
        For an action placed before another of its own rank that it needs, and for ranks that wait for
        each other: the cycle is named, and the move that repairs it.
    """
    columns = index_actions(orders, slicing)
    _check_names(orders, slicing, columns)
    positions = find_positions(columns, len(stage_to_rank), len(slicing.units))
    _check_complete(orders, slicing, stage_to_rank, columns, positions)
    dependencies = find_dependencies(columns, positions, slicing)
    check_progress(orders, columns["rank"], dependencies)
    return Graph(orders, slicing, stage_to_rank, dependencies=dependencies, **columns)


def _error(message: str, orders: Orders, marked: Sequence[Cell]) -> ScheduleError:
    return ScheduleError(f"{message}\n{format_around(orders, marked)}")


def _check_names(orders: Orders, slicing: Slicing, columns: dict[str, Indices]) -> None:
    """Every action names a microbatch and slice of the slicing."""
    unknown = np.flatnonzero(columns["unit"] < 0)
    if not len(unknown):
        return
    cell = _cell(columns, unknown[0])
    action, n_microbatches = _at(orders, cell), slicing.n_microbatches
    if action.microbatch >= n_microbatches:
        allowed = f"the slicing {slicing} has microbatches 0…{n_microbatches - 1}"
    else:
        n_slices = slicing.microbatches[action.microbatch].n_slices
        allowed = f"microbatch {action.microbatch} of {slicing} has slices 0…{n_slices - 1}"
    raise _error(f"{action} (rank {cell[0]}, step {cell[1]}) does not exist: {allowed}.", orders, [cell])


def _check_complete(
    orders: Orders, slicing: Slicing, stage_to_rank: tuple[int, ...], columns: dict[str, Indices], positions: Indices
) -> None:
    """Each stage has one F and one B (or I and W) for every unit; or no backward anywhere."""
    kept = positions[columns["kind"], columns["stage"], columns["unit"]]
    repeated = np.flatnonzero(kept != np.arange(len(kept)))
    if len(repeated):
        first, again = (_cell(columns, index) for index in (repeated[0], kept[repeated[0]]))
        raise _error(f"{_at(orders, first)} appears twice, at steps {first[1]} and {again[1]}.", orders, [first, again])
    present = positions >= 0
    has_backward = present[[B_CODE, I_CODE, W_CODE]].any()
    both = np.argwhere(present[B_CODE] & (present[I_CODE] | present[W_CODE]))
    if len(both):
        stage, unit = both[0]
        cells = [
            _cell(columns, positions[code, stage, unit]) for code in (B_CODE, I_CODE, W_CODE) if present[code, stage, unit]
        ]
        raise _error(
            f"{_at(orders, cells[0])} and {_at(orders, cells[1])}: a slice has either B or I and W, not both.", orders, cells
        )
    whole = present[B_CODE]
    lacking = {F_CODE: ~present[F_CODE]}
    if has_backward:
        lacking |= {I_CODE: ~whole & ~present[I_CODE] & present[W_CODE], W_CODE: ~whole & ~present[W_CODE] & present[I_CODE]}
        lacking[B_CODE] = ~whole & ~present[I_CODE] & ~present[W_CODE]
    for code, absent in lacking.items():
        if absent.any():
            stage, unit = np.argwhere(absent)[0]
            microbatch, place = slicing.units[unit][:2]
            action = Action(int(stage), KINDS[code], int(microbatch), int(place))
            rank = stage_to_rank[stage]
            raise _error(f"{action} is missing on rank {rank}.", orders, [(rank, len(orders[rank]))])


def _cell(columns: dict[str, Indices], index: int | np.int64) -> Cell:
    return int(columns["rank"][index]), int(columns["step"][index])


def _at(orders: Orders, cell: Cell) -> Action:
    return orders[cell[0]][cell[1]]
