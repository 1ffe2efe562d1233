"""Families and slicings, ranked: never above the cap, never slower for a larger one, and as simulated."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import PROPERTY

import terapipe as tp
from terapipe.errors import CostError, ScheduleError, SlicingError

MODEL = tp.ModelConfig(n_layers=8, d_model=32, n_heads=4, max_seq_tokens=256)
COST = tp.CallableCost(
    lambda l, c, b: 1 + l / 16 + l * (c + l / 2) / 8192,
    lambda l, c, b: 2 + l / 8 + l * (c + l / 2) / 4096,
    lambda l, c, b: 1 + l / 16,
)
FAMILIES = ["gpipe", "1f1b", "terapipe", "seq1f1b", "seq1f1b-interleaved", "seq1f1b-zb", "zbv", "svpp"]


def rank(**changes: object):
    given = {"cost": COST, "seq_tokens": 256, "n_ranks": 2, "n_microbatches": 2, "families": FAMILIES, "max_slices": 4}
    return tp.best_schedule(**(given | changes))


@pytest.fixture(scope="module")
def ranked():
    return rank(memory=tp.MemoryModel(MODEL))


def rebuild(row, n_ranks: int = 2) -> tp.Schedule:
    return tp.build_schedule(row.family, n_ranks, row.slicing, row.chunks_per_rank, **row.options)


def test_every_row_can_be_built_again_and_takes_what_it_says(ranked):
    memory = tp.MemoryModel(MODEL)
    for row in ranked.itertuples():
        v = row.chunks_per_rank
        part = tp.CallableCost(
            lambda l, c, b, v=v: COST.forward_ms(l, c, b) / v,
            lambda l, c, b, v=v: COST.backward_ms(l, c, b) / v,
            lambda l, c, b, v=v: COST.weight_ms(l, c, b) / v,
        )
        timeline = tp.simulate(rebuild(row), part, memory=memory)
        assert timeline.makespan_ms == pytest.approx(row.makespan_ms, rel=1e-12)
        assert timeline.peak_bytes().max() == row.peak_bytes
        assert timeline.bubble_fraction == pytest.approx(row.bubble_fraction, abs=1e-12)


def test_the_table_is_sorted_holds_every_family_and_no_row_twice(ranked):
    assert ranked["makespan_ms"].is_monotonic_increasing
    assert set(ranked["family"]) == set(FAMILIES)
    keys = ranked.assign(options=ranked["options"].map(str))[["family", "chunks_per_rank", "options", "slicing"]]
    assert not keys.duplicated().any()


def test_whole_microbatches_on_one_rank_hold_what_the_families_promise(ranked):
    """min(P, M) activations for 1f1b, M for gpipe and terapipe: units of one microbatch on one rank."""
    peaks = ranked.groupby("family")["peak_activations"].max()
    assert peaks[["gpipe", "terapipe"]].tolist() == [2, 2]
    assert peaks["1f1b"] == 2
    assert rank(n_microbatches=6, families=["1f1b", "gpipe"])["peak_activations"].tolist() == [2, 6]


@pytest.fixture(scope="module")
def few():
    return rank(memory=tp.MemoryModel(MODEL), families=["1f1b", "seq1f1b", "svpp"], max_slices=3)


@given(st.floats(0, 1.2))
@settings(PROPERTY, max_examples=12)
def test_no_row_is_above_the_cap_and_none_that_fits_is_left_out(few, share):
    low, high = few["peak_bytes"].min(), few["peak_bytes"].max()
    cap = float(low + share * (high - low))
    memory = tp.MemoryModel(MODEL)
    found = rank(memory=memory, memory_cap_bytes=cap, families=["1f1b", "seq1f1b", "svpp"], max_slices=3)
    assert all(memory.peak_bytes(rebuild(row)).max() <= cap for row in found.itertuples())
    assert len(found) == (few["peak_bytes"] <= cap).sum()
    assert found["makespan_ms"].iloc[0] == few["makespan_ms"][few["peak_bytes"] <= cap].min()


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_larger_cap_is_never_slower(n_ranks):
    given = {"memory": tp.MemoryModel(MODEL), "n_ranks": n_ranks, "families": ["gpipe", "seq1f1b", "seq1f1b-zb", "svpp"]}
    caps = np.unique(rank(**given)["peak_bytes"])
    best = [rank(**given, memory_cap_bytes=float(cap)).iloc[0] for cap in caps[:: len(caps) // 6]]
    times = [row["makespan_ms"] for row in best]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_a_cap_that_nothing_fits_names_the_least_need(ranked):
    least = ranked["peak_bytes"].min()
    with pytest.raises(ScheduleError, match=f"the least need is {least:.0f} bytes on a rank, with .* Raise the cap"):
        rank(memory=tp.MemoryModel(MODEL), memory_cap_bytes=float(least - 1))


def test_forbidden_slices_are_no_candidates():
    cost = tp.CallableCost(lambda l, c, b: np.where(np.asarray(l) > 100, np.inf, l), lambda l, c, b: 2.0 * np.asarray(l))
    found = rank(cost=cost, families=["terapipe"], max_slices=8)
    assert all(max(tp.Slicing.parse(text).microbatches[0].slice_tokens) <= 100 for text in found["slicing"])


def test_more_stages_than_layers_are_no_candidates():
    shallow = tp.ModelConfig(n_layers=2, d_model=32, n_heads=4, max_seq_tokens=256)
    found = rank(memory=tp.MemoryModel(shallow))
    assert set(found["chunks_per_rank"]) == {1}
    assert "zbv" not in set(found["family"])


def test_one_name_is_one_family():
    assert rank(families="seq1f1b").equals(rank(families=["seq1f1b"]))


HALVES = tp.CallableCost(
    lambda l, c, b: 1.0 + l, lambda l, c, b: 2.0 * l, lambda l, c, b: np.where(np.asarray(l) > 100, 3.0, 1.0) * l
)


def test_impossible_halves_leave_out_those_that_run_them_apart():
    """W = 3·l of B = 2·l in slices beyond 100 tokens, else W = l."""
    found = rank(cost=HALVES, families=["1f1b", "seq1f1b", "zb-h1", "seq1f1b-zb"])
    assert set(found["family"]) == {"1f1b", "seq1f1b", "seq1f1b-zb"}
    split = [
        max(tp.Slicing.parse(row.slicing).microbatches[0].slice_tokens) for row in found.itertuples() if "zb" in row.family
    ]
    assert max(split) <= 100
    whole = found[found["family"] != "seq1f1b-zb"]
    other = rank(cost=tp.CallableCost(HALVES.forward_ms, HALVES.backward_ms), families=["1f1b", "seq1f1b"])
    pd.testing.assert_frame_equal(whole.reset_index(drop=True), other)


def test_where_all_halves_are_impossible_it_says_so():
    with pytest.raises(
        ScheduleError, match=r"every candidate is left out: weight_ms of 768.0 ms is more than backward_ms of 512"
    ):
        rank(cost=HALVES, families=["zb-h1"])


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"families": ["seq1fb"]}, ScheduleError, "Did you mean 'seq1f1b'"),
        ({"families": "seq1fb"}, ScheduleError, "unknown schedule 'seq1fb'"),
        ({"families": ["1f1b", "forward-only"]}, ScheduleError, "forward-only runs forwards alone"),
        (
            {"cost": tp.CallableCost(lambda l, c, b: np.inf, lambda l, c, b: 1.0)},
            ScheduleError,
            "left out: a slice has an infinite",
        ),
        ({"families": []}, ScheduleError, r"none of \[\] can run"),
        ({"memory_cap_bytes": 1e9}, CostError, "without memory="),
        ({"chunks_per_rank": [0]}, ScheduleError, "chunks_per_rank=0"),
        ({"seq_tokens": 0}, SlicingError, "seq_tokens=0"),
        ({"n_microbatches": 0}, SlicingError, "n_microbatches=0"),
    ],
)
def test_it_refuses(changes, error, said):
    with pytest.raises(error, match=said):
        rank(**changes)
