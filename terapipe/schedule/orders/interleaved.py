"""One forward, one backward in turn, over several stages a rank: stage g = chunk·P + rank.

Units pass in groups of G: a rank runs a group through its first stage, then through its second, ….
With one stage a rank, the orders are those of 1f1b and seq1f1b.

G is P (Megatron) unless that would start a backward before all slices of its microbatch are there:
it is k where P divides k, and P·k where neither divides the other.
"""

from terapipe.schedule.action import Action, Kind
from terapipe.schedule.orders.family import Family
from terapipe.schedule.orders.one_f_one_b import alternate, count_warmup, seq1f1b
from terapipe.schedule.orders.pipeline import Order, Pipeline


def group_units(pipeline: Pipeline) -> int:
    """G: units that pass through one stage of a rank before its next stage runs them."""
    n_ranks, n_slices = pipeline.n_ranks, pipeline.n_slices
    if pipeline.chunks_per_rank == 1 or n_slices % n_ranks == 0:
        return n_slices
    return n_ranks if n_ranks % n_slices == 0 else n_ranks * n_slices


def count_looped_warmup(pipeline: Pipeline, rank: int) -> int:
    """Forwards before the first pair: min((v−1)G + 2(P−r−1) + k−1, N·v); with one stage a rank, seq1f1b's."""
    n_ranks, n_chunks = pipeline.n_ranks, pipeline.chunks_per_rank
    if n_chunks == 1:
        return count_warmup(pipeline, rank)
    needed = (n_chunks - 1) * group_units(pipeline) + 2 * (n_ranks - rank - 1) + pipeline.n_slices - 1
    return min(needed, pipeline.n_units * n_chunks)


def looped_streams(pipeline: Pipeline, rank: int) -> tuple[Order, Order]:
    """A rank's forwards and its backwards, each in the order in which they run."""
    n_ranks, n_chunks, size = pipeline.n_ranks, pipeline.chunks_per_rank, group_units(pipeline)
    forwards, backwards = [], []
    for start in range(0, pipeline.n_units, size):
        group = slice(start, start + size)
        for chunk in range(n_chunks):
            first, last = chunk * n_ranks + rank, (n_chunks - 1 - chunk) * n_ranks + rank
            forwards += [Action(first, Kind.F, *unit) for unit in pipeline.forwards[group]]
            backwards += [Action(last, Kind.B, *unit) for unit in pipeline.backwards[group]]
    return forwards, backwards


def interleaved(pipeline: Pipeline) -> list[Order]:
    """Megatron's interleaved order over units in place of microbatches."""
    return [
        list(alternate(*looped_streams(pipeline, rank), count_looped_warmup(pipeline, rank)))
        for rank in range(pipeline.n_ranks)
    ]


def slimpipe(pipeline: Pipeline) -> list[Order]:
    """Groups of one microbatch, as k is a multiple of P; with one stage a rank seq1f1b."""
    return seq1f1b(pipeline) if pipeline.chunks_per_rank == 1 else interleaved(pipeline)


def ragged_groups(pipeline: Pipeline) -> str:
    """What is wrong where the units do not fill groups of G; "" if nothing is."""
    size, n_slices, n_microbatches = group_units(pipeline), pipeline.n_slices, pipeline.n_microbatches
    if pipeline.chunks_per_rank == 1 or pipeline.n_units % size == 0:
        return ""
    step = size // n_slices  # microbatches of one group
    more = -(-n_microbatches // step) * step
    return (
        f"on {pipeline.n_ranks} ranks with {pipeline.chunks_per_rank} stages each, units pass in groups of {size}, and "
        f"{n_microbatches} microbatches of {n_slices} slices are {pipeline.n_units} units, no multiple of that. "
        f"Take {more} microbatches, or any multiple of {step}."
    )


def ragged_rounds(pipeline: Pipeline) -> str:
    """What is wrong with SlimPipe's slices: equal ones, as many as ranks or a multiple; "" if nothing is."""
    n_ranks, n_slices = pipeline.n_ranks, pipeline.n_slices
    if n_slices % n_ranks:
        return (
            f"slimpipe needs a number of slices that is a multiple of the ranks; the slicing {pipeline.slicing} has "
            f"{n_slices} a microbatch, for {n_ranks} ranks. Take {-(-n_slices // n_ranks) * n_ranks} slices."
        )
    for microbatch in pipeline.slicing.microbatches:
        shortest, longest = min(microbatch.slice_tokens), max(microbatch.slice_tokens)
        if longest - shortest > 1:
            return (
                f"slimpipe needs equal slices, a token more or less; the slicing {pipeline.slicing} has slices of "
                f"{shortest} and {longest} tokens."
            )
    return ""


FAMILIES = (
    Family(
        "interleaved",
        interleaved,
        takes_slices="whole",
        chunks=2,
        any_chunks=True,
        misfit=ragged_groups,
        alternatives=("seq1f1b-interleaved", "1f1b", "seq1f1b"),
        bubble="(P−1)·(t_F+t_B)/v",
        condition="M a multiple of P",
        peak_activations="((v−1)·P+2·(P−r−1)+1)/v if v > 1, else P−r",
        source="Megatron, arXiv 2104.04473",
    ),
    Family(
        "seq1f1b-interleaved",
        interleaved,
        takes_slices="equal",
        chunks=2,
        any_chunks=True,
        misfit=ragged_groups,
        alternatives=("seq1f1b",),
        bubble="(P−1)·(t_F+t_B)/(k·v)",
        condition="M·k a multiple of G",
        peak_activations="((v−1)·G+2·(P−r−1)+k)/(k·v) if v > 1, else (P−r−1+k)/k",
        source="Seq1F1B, arXiv 2406.03488, over Megatron's chunks",
    ),
    Family(
        "slimpipe",
        slimpipe,
        takes_slices="equal",
        any_chunks=True,
        misfit=ragged_rounds,
        alternatives=("seq1f1b", "seq1f1b-interleaved"),
        bubble="(P−1)·(t_F+t_B)/(k·v)",
        condition="equal slices, k a multiple of P",
        peak_activations="1+2·(P−r−1)/(k·v) if v > 1, else (P−r−1+k)/k",
        source="SlimPipe, arXiv 2504.14519",
    ),
)
