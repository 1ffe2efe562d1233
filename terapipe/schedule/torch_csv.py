"""The text of torch.distributed.pipelining's schedules: cells like "2F0", one row a rank.

torch's actions name a stage and a microbatch, no slice; its own reader takes "2F0.3" for "2F0"
without a word, so nothing sliced is ever written. A file that torch wrote after lowering also holds
transfers, and the gathering and reduction of sharded weights; all of these follow from the order of
the compute actions and are left out. "(2F0;3B1)OVERLAP_F_B", which torch runs one after the other,
reads as these two. (torch 2.13, `_Action`; private there, so nothing of torch is imported.)
"""

import re
from collections.abc import Sequence

from terapipe.errors import ScheduleError, check_integer
from terapipe.schedule.action import Action
from terapipe.slicing import MicrobatchSlices, Slicing, uniform_slicing

_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_FOLLOWS = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def format_rows(orders: Sequence[Sequence[Action]], slicing: Slicing) -> list[list[str]]:
    """The cells of torch's compute-order CSV."""
    if not slicing.is_whole:
        whole = Slicing(tuple(MicrobatchSlices(each.n_sequences, (slicing.seq_tokens,)) for each in slicing.microbatches))
        raise ScheduleError(
            f"torch's schedules know whole microbatches only; {slicing} cuts them into slices. Build the schedule for {whole}, "
            "or keep it as to_csv writes it, which names slices."
        )
    return [[f"{action.stage}{action.kind}{action.microbatch}" for action in order] for order in orders]


def read_rows(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The compute actions in the cells of a file of torch's, as text."""
    return [
        [text for step, cell in enumerate(row) for text in _read_cell(cell.strip(), f"rank {rank}, cell {step}")]
        for rank, row in enumerate(rows)
    ]


def _read_cell(cell: str, where: str) -> list[str]:
    overlap = _OVERLAP.fullmatch(cell)
    texts = [text.strip() for text in overlap.group(1).split(";")] if overlap else [cell]
    if not overlap and _FOLLOWS.fullmatch(cell):
        return []
    for text in texts:
        if not _COMPUTE.fullmatch(text):
            raise ScheduleError(
                f"{where}: {cell!r} is no action of torch's; its files hold compute actions like '2F0' (F, B, I, W), "
                "transfers like '2SEND_F0', '2UNSHARD', '2RESHARD', '2REDUCE_GRAD' and '(2F0;3B1)OVERLAP_F_B'. "
                "Read a file that names slices with Schedule.from_csv."
            )
    return texts


def find_slicing(rows: Sequence[Sequence[str]], slicing: Slicing | str | None, seq_tokens: int | None) -> Slicing:
    """The whole microbatches that the actions name: the slicing given, or as many as there are of `seq_tokens`."""
    n_microbatches = 1 + max((Action.parse(text).microbatch for row in rows for text in row), default=0)
    if (slicing is None) == (seq_tokens is None):
        raise ScheduleError(
            f"slicing={slicing!r}, seq_tokens={seq_tokens!r}: needs one of the two. The file names {n_microbatches} "
            "microbatches and not how long they are; seq_tokens=1024 makes each one sequence of 1024 tokens."
        )
    if slicing is None:
        return uniform_slicing(check_integer("seq_tokens", seq_tokens, 1, ScheduleError), 1, n_microbatches)
    slicing = Slicing.parse(slicing) if isinstance(slicing, str) else slicing
    if not slicing.is_whole or slicing.n_microbatches != n_microbatches:
        raise ScheduleError(
            f"the file runs {n_microbatches} whole microbatches; the slicing {slicing} has {slicing.n_microbatches}"
            f"{'' if slicing.is_whole else ', cut into slices'}. Give one like "
            f"'[({slicing.microbatches[0].n_sequences}, [{slicing.seq_tokens}])] * {n_microbatches}'."
        )
    return slicing
