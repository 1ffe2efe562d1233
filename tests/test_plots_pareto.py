"""Speed against memory: which points are beaten, what the axes count, and the cap."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

import terapipe as tp
from terapipe.errors import ScheduleError
from terapipe.plots.pareto import dominated

GIB = 2.0**30
TABLE = pd.DataFrame(
    {
        "family": ["1f1b", "seq1f1b", "terapipe", "gpipe"],
        "slicing": ["a", "b", "c", "d"],
        "makespan_ms": [40.0, 20.0, 18.0, 45.0],
        "peak_bytes": [2 * GIB, 1 * GIB, 4 * GIB, 4 * GIB],
        "peak_activations": [2.0, 1.0, 4.0, 4.0],
    }
)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
@PROPERTY
def test_a_point_is_beaten_where_another_is_no_worse_in_both_and_better_in_one(points):
    points = sorted(points)
    peak, makespan = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    expected = [any(p <= x and m <= y and (p, m) != (x, y) for p, m in points) for x, y in points]
    assert dominated(peak, makespan).tolist() == expected


def test_beaten_points_are_grey_and_the_others_have_their_family():
    fig = tp.plots.pareto(TABLE)
    traces = {trace.name: (list(trace.x), list(trace.y)) for trace in fig.data}
    assert traces == {
        "beaten": ([2.0, 4.0], [40.0, 45.0]),
        "beaten by none": ([1.0, 4.0], [20.0, 18.0]),
        "seq1f1b": ([1.0], [20.0]),
        "terapipe": ([4.0], [18.0]),
    }
    assert fig.layout.xaxis.title.text == "peak of the rank with most (GiB)"
    assert not fig.layout.shapes


def test_the_cap_is_a_line_in_the_axis_unit():
    fig = tp.plots.pareto(TABLE, cap_bytes=3 * GIB)
    (line,) = fig.layout.shapes
    assert (line.x0, line.x1, line.line.dash) == (3.0, 3.0, "dash")
    assert [each.text for each in fig.layout.annotations if each.text == "cap"] == ["cap"]
    assert "2 beaten by none" in next(each.text for each in fig.layout.annotations if each.name == "header")


def test_without_bytes_the_axis_counts_activations_of_a_microbatch():
    fig = tp.plots.pareto(TABLE.assign(peak_bytes=np.nan))
    assert list(fig.data[1].x) == [1.0, 4.0]
    assert "activations of a microbatch" in fig.layout.xaxis.title.text


def test_extrapolated_costs_are_badged():
    badges = [
        next(
            each.text for each in tp.plots.pareto(TABLE.assign(extrapolated=beyond)).layout.annotations if each.name == "badge"
        )
        for beyond in (False, True)
    ]
    assert badges == ["simulated", "simulated, extrapolated"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"max_in_flight": 3}, ", max_in_flight=3"),
        ({}, ""),
        (None, ""),
        ("", ""),
        (np.nan, ""),
        ("tuned by hand", ", tuned by hand"),
    ],
)
def test_options_of_a_row_of_ones_own_are_shown_as_they_are(options, shown):
    fig = tp.plots.pareto(TABLE.assign(options=[options] * 4))
    assert fig.data[0].customdata[0] == f"<b>1f1b</b>{shown}<br>a"


def test_a_point_that_ties_in_one_is_beaten_too():
    table = TABLE[:2].assign(makespan_ms=[20.0, 20.0])
    fig = tp.plots.pareto(table)
    assert {trace.name: len(trace.x) for trace in fig.data} == {"beaten": 1, "beaten by none": 1, "seq1f1b": 1}


@pytest.mark.parametrize(
    ("table", "cap_bytes", "said"),
    [
        (TABLE.drop(columns="makespan_ms"), None, "makespan_ms"),
        (TABLE[:0], None, "needs rows"),
        ([1, 2], None, "use tp.best_schedule"),
        (TABLE.assign(peak_bytes=np.nan), 1e9, "a table with bytes"),
        (TABLE, -1, "cap_bytes=-1"),
    ],
)
def test_it_refuses(table, cap_bytes, said):
    with pytest.raises(ScheduleError, match=said):
        tp.plots.pareto(table, cap_bytes)
