"""All forwards, then all backwards; and forwards alone.

rank 0   F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0        terapipe, 2 ranks, one microbatch of 4 slices:
rank 1   .. F0 F1 F2 F3 B3 B2 B1 B0                 forwards ascending, backwards descending
"""

from terapipe.schedule.action import Kind
from terapipe.schedule.orders.family import Family
from terapipe.schedule.orders.pipeline import Order, Pipeline, actions


def terapipe(pipeline: Pipeline) -> list[Order]:
    """All forwards ascending, then all backwards: microbatches and the slices in each descending."""
    units = pipeline.forwards
    return [actions(rank, Kind.F, units) + actions(rank, Kind.B, reversed(units)) for rank in range(pipeline.n_ranks)]


def looped_bfs(pipeline: Pipeline) -> list[Order]:
    """The first stage of a rank runs all its units before the second starts; backwards the other way round."""
    orders = []
    for rank in range(pipeline.n_ranks):
        stages = range(rank, pipeline.n_ranks * pipeline.chunks_per_rank, pipeline.n_ranks)
        forwards = [action for stage in stages for action in actions(stage, Kind.F, pipeline.forwards)]
        orders.append(forwards + [action._replace(kind=Kind.B) for action in reversed(forwards)])
    return orders


def forward_only(pipeline: Pipeline) -> list[Order]:
    """All forwards, nothing kept for a backward."""
    return [actions(rank, Kind.F, pipeline.forwards) for rank in range(pipeline.n_ranks)]


FAMILIES = (
    Family(
        "gpipe",
        terapipe,
        takes_slices="whole",
        alternatives=("terapipe",),
        bubble="(P−1)·(t_F+t_B)",
        peak_activations="M",
        source="GPipe, arXiv 1811.06965",
    ),
    Family(
        "terapipe",
        terapipe,
        bubble="(P−1)·(t_F+t_B)/k",
        peak_activations="M",
        source="TeraPipe, arXiv 2102.07988",
    ),
    Family(
        "looped-bfs",
        looped_bfs,
        chunks=2,
        any_chunks=True,
        runs_on_ranks=False,
        bubble="(P−1)·(t_F+t_B)/(k·v)",
        condition="N ≥ P",
        peak_activations="M",
        source="Breadth-first pipeline parallelism, arXiv 2211.05953",
    ),
    Family(
        "forward-only",
        forward_only,
        kinds="F",
        bubble="(P−1)·t_F/k",
        peak_activations="1/k",
        source="Pipelined evaluation, without a backward",
    ),
)
