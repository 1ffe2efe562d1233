"""Equal-FLOPs slices: equal by the count that they say, and the published ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

import terapipe as tp
from terapipe.errors import SlicingError

LONG = tp.ModelConfig(32, 6144, 64, vocab_size=50_000, max_seq_tokens=65_536)


def flops(model, n, end, count):
    """FLOPs of the slice of n tokens that ends at `end`, by the counts of the docstring."""
    h, heads, d, f = model.d_model, model.n_heads, model.head_dim, model.ff_dim
    if count == "causal":
        return model.n_layers * (24 * n * h**2 + 4 * n * h * (end - n / 2))
    layer = n * end * (4 * d + 3) * heads - n**2 * (4 * d + 3) * heads / 2 + 8 * n * h * heads * d + 4 * n * h * f
    return model.n_layers * layer + 4 * n * h * model.vocab_size


def test_the_slices_of_64k_tokens_at_width_6144():
    """[23474, 16619, 13620, 11823] ± 1, worked out by hand from 24nh² + 4nh(p − n/2)."""
    (microbatch,) = tp.equal_flops_slicing(LONG, 65_536, 4).microbatches
    assert np.abs(np.subtract(microbatch.slice_tokens, [23474, 16619, 13620, 11823])).max() <= 1


@pytest.mark.parametrize("count", ["causal", "seq1f1b"])
@pytest.mark.parametrize("n_slices", [1, 2, 4, 7, 16])
def test_every_slice_has_its_share_to_a_token(count, n_slices):
    slicing = tp.equal_flops_slicing(LONG, 65_536, n_slices, flops_count=count)
    lengths = np.array(slicing.microbatches[0].slice_tokens)
    ends = np.cumsum(lengths)
    shares = flops(LONG, lengths, ends, count)
    token = flops(LONG, 1, 65_536, count)
    assert shares.sum() == pytest.approx(flops(LONG, 65_536, 65_536, count))
    assert np.ptp(shares) <= 2 * token
    assert (np.diff(lengths) <= 1).all()


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["causal", "seq1f1b"]), st.sampled_from([8, 64, 4096]))
@PROPERTY
def test_every_slice_keeps_a_token(seq_tokens, n_slices, count, width):
    n_slices = min(n_slices, seq_tokens)
    model = tp.ModelConfig(2, width, 2)
    slicing = tp.equal_flops_slicing(model, seq_tokens, n_slices, 3, 2, flops_count=count)
    assert slicing.seq_tokens == seq_tokens
    assert slicing.n_microbatches == 3
    assert slicing.n_sequences == 6
    assert all(each.n_slices == n_slices and min(each.slice_tokens) >= 1 for each in slicing.microbatches)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_slices": 0}, "n_slices=0"),
        ({"n_slices": 17}, "17 slices of 16 tokens"),
        ({"n_sequences": 0}, "n_sequences=0"),
        ({"flops_count": "causl"}, "unknown flops_count 'causl'. Did you mean 'causal'"),
    ],
)
def test_what_cannot_be_is_refused_quoting_it(changes, said):
    with pytest.raises(SlicingError, match=said):
        tp.equal_flops_slicing(LONG, **{"seq_tokens": 16, "n_slices": 4, **changes})
