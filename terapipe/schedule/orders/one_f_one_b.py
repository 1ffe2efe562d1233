"""One forward, one backward in turn, one stage a rank.

rank 0   F0 F1 .. B0 F2 .. B1 F3 .. B2 .. .. B3     1f1b, 2 ranks, 4 microbatches, backward as long
rank 1   .. F0 B0 F1 .. B1 F2 .. B2 F3 B3           as forward
"""

from collections.abc import Iterator

from terapipe.schedule.action import Action, Kind
from terapipe.schedule.orders.family import Family
from terapipe.schedule.orders.pipeline import Order, Pipeline, actions


def count_warmup(pipeline: Pipeline, rank: int) -> int:
    """Forwards that stand before the first pair: min(P−r−2+k, N)."""
    return min(pipeline.n_ranks - rank - 2 + pipeline.n_slices, pipeline.n_units)


def alternate(forwards: Order, backwards: Order, n_warmup: int) -> Iterator[Action]:
    """`n_warmup` forwards, then a forward and a backward in turn, then the remaining backwards."""
    n_pairs = len(forwards) - n_warmup
    yield from forwards[:n_warmup]
    for pair in zip(forwards[n_warmup:], backwards[:n_pairs], strict=True):
        yield from pair
    yield from backwards[n_pairs:]


def seq1f1b(pipeline: Pipeline) -> list[Order]:
    """One forward and one backward in turn; slices last in, first out. Of whole microbatches it is 1f1b."""
    return [
        list(
            alternate(
                actions(rank, Kind.F, pipeline.forwards),
                actions(rank, Kind.B, pipeline.backwards),
                count_warmup(pipeline, rank),
            )
        )
        for rank in range(pipeline.n_ranks)
    ]


FAMILIES = (
    Family(
        "1f1b",
        seq1f1b,
        takes_slices="whole",
        alternatives=("seq1f1b",),
        bubble="(P−1)·(t_F+t_B)",
        peak_activations="P−r",
        source="PipeDream-flush, arXiv 2006.09503; Megatron, arXiv 2104.04473",
    ),
    Family(
        "seq1f1b",
        seq1f1b,
        bubble="(P−1)·(t_F+t_B)/k",
        peak_activations="(P−r−1+k)/k",
        source="Seq1F1B, arXiv 2406.03488",
    ),
)
