"""Equal-FLOPs slices: each has the same share of a sequence's causal FLOPs (Seq1F1B, arXiv 2406.03488)."""

from typing import Literal, get_args

import numpy as np

from terapipe.config import ModelConfig
from terapipe.errors import SlicingError, unknown_name
from terapipe.slicing.value import MicrobatchSlices, Slicing, check_cut

FlopsCount = Literal["causal", "seq1f1b"]


def equal_flops_slicing(
    model: ModelConfig,
    seq_tokens: int,
    n_slices: int,
    n_microbatches: int = 1,
    n_sequences: int = 1,
    flops_count: FlopsCount = "causal",
) -> Slicing:
    """Slices of equal FLOPs: later tokens attend to more, so the first slices are the longest.

    It equalises FLOPs, not time: short late slices run at lower efficiency (see `optimal_slicing`).

    Parameters
    ----------
    model : ModelConfig
        Its sizes enter; embedding and head do not under "causal".
    seq_tokens, n_slices, n_microbatches, n_sequences : int
        As in `uniform_slicing`.
    flops_count : "causal" or "seq1f1b"
        FLOPs of the slice of n tokens that ends at position p, in a layer.
        "causal": 24·n·h² + 4·n·h·(p − n/2), h = d_model.
        "seq1f1b": n·p·(4d+3)·H − n²·(4d+3)·H/2 + 8·n·h·H·d + 4·n·h·f, and 4·n·h·V for the head once;
        H heads of size d, f = d_ff, V = vocab_size: what Seq1F1B's code counts.

    Raises
    ------
    SlicingError
        For sizes below 1, more slices than tokens, an unknown count.
    """
    check_cut(seq_tokens, n_slices, n_microbatches, n_sequences)
    per_token, per_pair = _flops_rates(model, flops_count)
    # The first x tokens cost a·x + b·x²/2; the ends are where that is 1/k, 2/k, … of the whole.
    shares = np.arange(1, n_slices) / n_slices * (per_token * seq_tokens + per_pair * seq_tokens**2 / 2)
    ends = np.rint((np.sqrt(per_token**2 + 2 * per_pair * shares) - per_token) / per_pair).astype(int)
    place = np.arange(n_slices - 1)  # rounded ends may meet: every slice keeps a token
    ends = np.minimum(np.maximum.accumulate(np.maximum(ends, 1) - place) + place, seq_tokens - n_slices + 1 + place)
    lengths = np.diff(ends, prepend=0, append=seq_tokens)
    return Slicing((MicrobatchSlices(n_sequences, tuple(int(length) for length in lengths)),) * n_microbatches)


def _flops_rates(model: ModelConfig, flops_count: str) -> tuple[float, float]:
    """FLOPs of a token by itself, and of a pair of a token and one it attends to, over all layers."""
    if flops_count not in get_args(FlopsCount):
        raise SlicingError(unknown_name("flops_count", flops_count, get_args(FlopsCount)))
    hidden, layers = model.d_model, model.n_layers
    if flops_count == "causal":
        return layers * 24 * hidden**2, layers * 4 * hidden
    heads, head_size = model.n_heads, model.head_dim
    linear = layers * (8 * hidden * heads * head_size + 4 * hidden * model.ff_dim) + 4 * hidden * model.vocab_size
    return linear, layers * (4 * head_size + 3) * heads
