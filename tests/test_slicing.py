"""Slicings: the paper's notation both ways, equal slices, and what is no slicing."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, slicings

import terapipe as tp
from terapipe.errors import SlicingError
from terapipe.slicing import MicrobatchSlices

# TeraPipe (2102.07988), the published schemes: microbatches, slices in each. All are of 2048 tokens and one sequence.
PUBLISHED = {
    "[(1, [776, 640, 632])] * 16": (16, 3),
    "[(1, [704, 688, 656])] * 32": (32, 3),
    "[(1, [384, 384, 368, 320, 296, 296])] * 8": (8, 6),
    "[(1, [120] * 4 + [112] * 6 + [104] * 8 + [64])] * 2": (2, 19),
    "[(1, [2048])] * 72": (72, 1),
}


@pytest.mark.parametrize("text", PUBLISHED)
def test_a_published_scheme_is_2048_tokens_and_reads_back_as_written(text):
    slicing = tp.Slicing.parse(text)
    assert str(slicing) == text
    assert slicing.seq_tokens == 2048
    assert (slicing.n_microbatches, slicing.microbatches[0].n_slices) == PUBLISHED[text]
    assert slicing.n_sequences == slicing.n_microbatches
    assert slicing.n_tokens == 2048 * slicing.n_microbatches


def test_the_scheme_of_setting_9_has_its_19_slices_in_order():
    slicing = tp.Slicing.parse("[(1, [120] * 4 + [112] * 6 + [104] * 8 + [64])] * 2")
    assert slicing.microbatches[1].slice_tokens == (120,) * 4 + (112,) * 6 + (104,) * 8 + (64,)
    assert slicing.microbatches[0] == MicrobatchSlices(1, (120,) * 4 + (112,) * 6 + (104,) * 8 + (64,))


@pytest.mark.parametrize(
    ("text", "microbatches"),
    [
        ("[(1, [4])]", [(1, [4])]),
        ("[(2, [3, 1])] * 2", [(2, [3, 1])] * 2),
        ("[(1, [4]), (3, [2, 2])]", [(1, [4]), (3, [2, 2])]),
        ("[(1, [4])] * 2 + [(1, [3, 1])]", [(1, [4])] * 2 + [(1, [3, 1])]),
        ("[(1, [4]), (1, [2, 2])] * 2", [(1, [4]), (1, [2, 2])] * 2),
        ("[(1, [1, 2] * 2 + [3])]", [(1, [1, 2, 1, 2, 3])]),
        ("  [ ( 1 ,[4 ] ) ]*2\n", [(1, [4])] * 2),
        ("[(1,[2]*2)]", [(1, [2, 2])]),
    ],
)
def test_stars_and_pluses_read_at_both_levels_in_any_spacing(text, microbatches):
    assert [(each.n_sequences, list(each.slice_tokens)) for each in tp.Slicing.parse(text).microbatches] == microbatches


@given(slicings())
@PROPERTY
def test_every_slicing_comes_back_from_its_text_and_its_repr(slicing):
    assert tp.Slicing.parse(str(slicing)) == slicing
    assert eval(repr(slicing), {"Slicing": tp.Slicing}) == slicing
    assert pickle.loads(pickle.dumps(slicing)) == slicing


@given(slicings())
@PROPERTY
def test_contexts_are_the_tokens_before_and_units_list_every_slice(slicing):
    rows = [
        (m, s, length, sum(each.slice_tokens[:s]), each.n_sequences)
        for m, each in enumerate(slicing.microbatches)
        for s, length in enumerate(each.slice_tokens)
    ]
    assert [tuple(row) for row in slicing.units.tolist()] == rows
    assert [rows[first][:2] for first in slicing.first_units] == [(m, 0) for m in range(slicing.n_microbatches)]
    assert slicing.n_tokens == sum(row[2] * row[4] for row in rows)
    assert slicing.is_whole == (len(rows) == slicing.n_microbatches)
    for each in slicing.microbatches:
        assert each.context_tokens[-1] + each.slice_tokens[-1] == slicing.seq_tokens


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("__import__('os')", 0),
        ("[(1, [2048])] * len('x')", 16),
        ("(1, [4])", 0),
        ("[(1, [4])", 9),
        ("[(1, [4])]]", 10),
        ("[(1, [4])] 2", 11),
        ("[(1, [4])] *", 12),
        ("[(1, [4])] +", 12),
        ("[(1, [4],)]", 8),
        ("[(1, [4,])]", 8),
        ("[(1, [])]", 6),
        ("[]", 1),
        ("[(1, 4)]", 5),
        ("[(1 [4])]", 4),
        ("[([4])]", 2),
        ("[(1, [-4])]", 6),
        ("[(1, [1.5])]", 7),
        ("[(1, [1e3])]", 7),
        ("[(1, [2**3])]", 7),
        ("[(1, [4]) * 2]", 10),
        ("2 * [(1, [4])]", 0),
        ("[(1, [0x10])]", 7),
        ("[(1, [4])]; import os", 10),
    ],
)
def test_text_that_is_no_slicing_is_refused_quoting_it_with_the_place_marked(text, position):
    with pytest.raises(SlicingError) as refusal:
        tp.Slicing.parse(text)
    first, quoted, marker, hint = str(refusal.value).split("\n")
    assert repr(text) in first
    assert f"at character {position}." in first
    assert quoted == f"    {text}"
    assert marker == " " * (4 + position) + "^"
    assert "[(1, [776, 640, 632])] * 16" in hint


@given(st.text(alphabet="[](),*+ 0123456789a_'.-", max_size=20))
@PROPERTY
def test_no_text_raises_anything_but_a_slicing_error(text):
    try:
        slicing = tp.Slicing.parse(text)
    except SlicingError:
        return
    assert tp.Slicing.parse(str(slicing)) == slicing


@pytest.mark.parametrize("given_value", [None, 3, ["[(1, [4])]"], b"[(1, [4])]"])
def test_what_is_no_text_is_refused_quoting_it(given_value):
    with pytest.raises(SlicingError) as refusal:
        tp.Slicing.parse(given_value)
    assert repr(given_value) in str(refusal.value)


@pytest.mark.parametrize("text", ["[(1, [4])] * 1000000000", "[(1, [4] * 1000000000)]", "[(1, [4])] * 99999999999999999999"])
def test_a_typing_error_in_a_count_does_not_fill_the_memory(text):
    with pytest.raises(SlicingError, match=r"at most (1000000 slices|18 digits)"):
        tp.Slicing.parse(text)


@pytest.mark.timeout(3)
def test_counts_at_both_levels_that_multiply_beyond_the_memory_are_refused():
    with pytest.raises(SlicingError, match="at most"):
        tp.Slicing.parse("[(1, [1] * 1000000)] * 1000000")


def test_a_number_of_5000_digits_is_refused_as_a_slicing():
    with pytest.raises(SlicingError):
        tp.Slicing.parse(f"[({'9' * 5000}, [4])]")


@given(seq_tokens=st.integers(1, 300), share=st.floats(0, 1), n_microbatches=st.integers(1, 4), n_sequences=st.integers(1, 4))
@PROPERTY
def test_uniform_lengths_differ_by_at_most_1_longer_first_and_add_up(seq_tokens, share, n_microbatches, n_sequences):
    n_slices = 1 + int(share * (seq_tokens - 1))
    slicing = tp.uniform_slicing(seq_tokens, n_slices, n_microbatches, n_sequences)
    lengths = slicing.microbatches[0].slice_tokens
    assert len(lengths) == n_slices
    assert sum(lengths) == slicing.seq_tokens == seq_tokens
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True)
    assert slicing.microbatches == (MicrobatchSlices(n_sequences, lengths),) * n_microbatches


def test_10_tokens_in_3_slices_are_4_3_3():  # S9: length 10 over 3 slices drops nothing
    assert str(tp.uniform_slicing(10, 3)) == "[(1, [4, 3, 3])]"
    assert str(tp.uniform_slicing(1, 1)) == "[(1, [1])]"
    assert str(tp.uniform_slicing(12, 6, n_microbatches=2, n_sequences=3)) == "[(3, [2] * 6)] * 2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3, 4), "4 slices of 3 tokens"),  # S22
        ((0, 1), "seq_tokens=0"),
        ((-1, 1), "seq_tokens=-1"),
        ((4, 0), "n_slices=0"),
        ((4, 2, 0), "n_microbatches=0"),
        ((4, 2, 1, 0), "n_sequences=0"),
    ],
)
def test_more_slices_than_tokens_and_sizes_below_1_are_refused(arguments, said):
    with pytest.raises(SlicingError, match=said):
        tp.uniform_slicing(*arguments)


@pytest.mark.parametrize("arguments", [(3.5, 2), (4, 1.5), (4, 2, 1.5), (4, 2, 1, 1.5)])
def test_uniform_refuses_a_size_that_is_no_whole_number_rather_than_round_it(arguments):
    with pytest.raises(SlicingError):
        tp.uniform_slicing(*arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[(1, [4, 0])]", r"slice 1 of \[4, 0\] has 0 tokens"),  # S22
        ("[(1, [0])]", r"slice 0 of \[0\] has 0 tokens"),
        ("[(0, [4])]", "a microbatch of 0 sequences"),
        ("[(1, [4] * 0)]", "a microbatch without slices"),
        ("[(1, [4])] * 0", "a slicing without microbatches"),
        ("[(1, [4]), (1, [2, 1])]", r"microbatch 1 has 3 tokens, microbatch 0 has 4.*\[2, 1\] against \[4\]"),
    ],
)
def test_empty_pieces_and_microbatches_of_different_tokens_are_refused_naming_them(text, said):
    with pytest.raises(SlicingError, match=said):
        tp.Slicing.parse(text)


@pytest.mark.parametrize(
    ("n_sequences", "lengths"),
    [(0, (4,)), (-1, (4,)), (1, ()), (1, (4, 0)), (1, (-1, 5)), (1.5, (4,)), (1, (1.7, 2.3)), (1, ("a",))],
)
def test_a_microbatch_built_by_hand_is_held_to_the_same_rules(n_sequences, lengths):
    with pytest.raises(SlicingError):
        MicrobatchSlices(n_sequences, lengths)


def test_numpy_lengths_are_taken_as_numbers():
    each = MicrobatchSlices(1, np.array([3, 1]))
    assert each.slice_tokens == (3, 1)
    assert all(type(length) is int for length in each.slice_tokens)
    assert str(tp.Slicing([each])) == "[(1, [3, 1])]"
