"""The backward in two halves, one stage a rank: I, which the rank before waits for, and W, which fills gaps.

rank 0   F0 F1 .. .. I0 W0 F2 ..                    zb-h1, 2 ranks: rank r keeps r weight gradients
rank 1   .. F0 I0 F1 I1 W0 F2 ..                    back, so that every rank holds P microbatches
"""

from collections.abc import Iterator

from terapipe.schedule.action import Action, Kind
from terapipe.schedule.orders.family import Family
from terapipe.schedule.orders.one_f_one_b import count_warmup
from terapipe.schedule.orders.pipeline import Order, Pipeline, actions


def seq1f1b_zb(pipeline: Pipeline) -> list[Order]:
    """seq1f1b's forwards and backwards; W runs r places behind I. Of whole microbatches it is zb-h1."""
    return [list(_lag_weights(pipeline, rank, count_warmup(pipeline, rank), rank)) for rank in range(pipeline.n_ranks)]


def zb_h2(pipeline: Pipeline) -> list[Order]:
    """Twice the warm-up of zb-h1, so that a rank's own span has no gap at equal times; W runs 2r places behind I."""
    n_ranks = pipeline.n_ranks
    return [list(_lag_weights(pipeline, rank, 2 * (n_ranks - rank - 1), 2 * rank)) for rank in range(n_ranks)]


def _lag_weights(pipeline: Pipeline, rank: int, n_warmup: int, lag: int) -> Iterator[Action]:
    """`n_warmup` forwards; then F if any is left, I, and the W that is `lag` places behind; then the remaining W."""
    forwards, inputs, weights = _streams(pipeline, rank)
    yield from forwards[:n_warmup]
    for index, input_gradient in enumerate(inputs):
        yield from forwards[n_warmup + index : n_warmup + index + 1]
        yield input_gradient
        if index >= lag:
            yield weights[index - lag]
    yield from weights[max(0, len(weights) - lag) :]


def _streams(pipeline: Pipeline, rank: int) -> tuple[Order, Order, Order]:
    return (
        actions(rank, Kind.F, pipeline.forwards),
        actions(rank, Kind.I, pipeline.backwards),
        actions(rank, Kind.W, pipeline.backwards),
    )


FAMILIES = (
    Family(
        "zb-h1",
        seq1f1b_zb,
        takes_slices="whole",
        kinds="FIW",
        alternatives=("seq1f1b-zb",),
        bubble="(P−1)·max(t_F, t_F+t_I−t_W)",
        condition="M ≥ P",
        peak_activations="P",
        source="Zero bubble, arXiv 2401.10241",
    ),
    Family(
        "zb-h2",
        zb_h2,
        takes_slices="whole",
        kinds="FIW",
        runs_on_ranks=False,
        alternatives=("seq1f1b-zb",),
        bubble="(P−1)·max(t_F, t_F+t_I−2·t_W)",
        condition="M ≥ 2·P−1",
        peak_activations="2·P−1",
        source="Zero bubble, arXiv 2401.10241",
    ),
    Family(
        "seq1f1b-zb",
        seq1f1b_zb,
        kinds="FIW",
        bubble="(P−1)·max(t_F, t_F+t_I−t_W)/k",
        condition="N ≥ P+k−1",
        peak_activations="(P+k−1)/k",
        source="Slices of arXiv 2406.03488 under the order of arXiv 2401.10241",
    ),
)
