"""The schedule families: one short function each, from (ranks, slicing) to every rank's compute order.

rank 0   F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0        terapipe, 2 ranks, one microbatch of 4 slices:
rank 1   .. F0 F1 F2 F3 B3 B2 B1 B0                 forwards ascending, backwards descending
"""

from collections.abc import Callable

from terapipe.errors import ScheduleError, unknown_name
from terapipe.schedule.action import Action, Kind
from terapipe.schedule.schedule import Schedule
from terapipe.slicing import Slicing

Order = list[Action]


def gpipe(n_ranks: int, slicing: Slicing) -> list[Order]:
    """All forwards, then all backwards, whole microbatches (GPipe, NeurIPS 2019)."""
    _need_whole("gpipe", slicing)
    return terapipe(n_ranks, slicing)


def terapipe(n_ranks: int, slicing: Slicing) -> list[Order]:
    """All forwards ascending, then all backwards: microbatches and the slices in each descending (TeraPipe, ICML 2021)."""
    units = [(int(microbatch), int(place)) for microbatch, place in slicing.units[:, :2]]
    return [
        [Action(rank, Kind.F, *unit) for unit in units] + [Action(rank, Kind.B, *unit) for unit in reversed(units)]
        for rank in range(n_ranks)
    ]


def one_f_one_b(n_ranks: int, slicing: Slicing) -> list[Order]:
    """min(P−r−1, M) warm-up forwards, then forward and backward in turn, whole microbatches (PipeDream-flush, Megatron)."""
    _need_whole("1f1b", slicing)
    return seq1f1b(n_ranks, slicing)


def seq1f1b(n_ranks: int, slicing: Slicing) -> list[Order]:
    """min(P−r−2+k, N) warm-up forwards, then a forward and a backward in turn (Seq1F1B, arXiv 2406.03488).

    Microbatches first in, first out; the slices of each last in, first out. N is the number of units; k the most slices
    of any microbatch, as the first backward needs all slices of microbatch 0. With k = 1 it is 1f1b.
    """
    forwards = [(int(microbatch), int(place)) for microbatch, place in slicing.units[:, :2]]
    backwards = sorted(forwards, key=lambda unit: (unit[0], -unit[1]))
    most = max(microbatch.n_slices for microbatch in slicing.microbatches)
    orders = []
    for rank in range(n_ranks):
        n_warmup = min(n_ranks - rank - 2 + most, len(forwards))
        n_pairs = len(forwards) - n_warmup
        order = [Action(rank, Kind.F, *unit) for unit in forwards[:n_warmup]]
        for forward, backward in zip(forwards[n_warmup:], backwards[:n_pairs], strict=True):
            order += [Action(rank, Kind.F, *forward), Action(rank, Kind.B, *backward)]
        orders.append(order + [Action(rank, Kind.B, *unit) for unit in backwards[n_pairs:]])
    return orders


FAMILIES: dict[str, Callable[[int, Slicing], list[Order]]] = {
    "gpipe": gpipe,
    "terapipe": terapipe,
    "1f1b": one_f_one_b,
    "seq1f1b": seq1f1b,
}


def build_schedule(name: str, n_ranks: int, slicing: Slicing | str, chunks_per_rank: int = 1) -> Schedule:
    """The schedule of a family.

    Parameters
    ----------
    name : str
        One of `FAMILIES`.
    n_ranks : int
        Pipeline ranks.
    slicing : Slicing or str
        Microbatches and slices; families of whole microbatches refuse slices.
    chunks_per_rank : int
        Stages on each rank; these families place one.

    Raises
    ------
    ScheduleError
        For an unknown name, or what the family cannot run.
    """
    if name not in FAMILIES:
        raise ScheduleError(unknown_name("schedule", name, FAMILIES))
    if n_ranks < 1:
        raise ScheduleError(f"n_ranks={n_ranks}: needs at least 1.")
    if chunks_per_rank != 1:
        raise ScheduleError(
            f"chunks_per_rank={chunks_per_rank}: {name} places one stage on each rank. Use chunks_per_rank=1, "
            "or type an order with several stages a rank (Schedule.from_orders)."
        )
    slicing = Slicing.parse(slicing) if isinstance(slicing, str) else slicing
    return Schedule(tuple(tuple(order) for order in FAMILIES[name](n_ranks, slicing)), slicing, name)


def _need_whole(name: str, slicing: Slicing) -> None:
    if not slicing.is_whole:
        most = max(microbatch.n_slices for microbatch in slicing.microbatches)
        raise ScheduleError(
            f"{name} runs whole microbatches; the slicing {slicing} has up to {most} slices in one. "
            "Use 'terapipe' or 'seq1f1b', which take slices, or a slicing with one slice a microbatch."
        )
