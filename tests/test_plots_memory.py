"""Memory curves: they start with the weights, change where an action ends, and peak where the timeline does."""

import numpy as np
import pytest

import terapipe as tp
from terapipe.errors import TimelineError

MODEL = tp.ModelConfig(4, 64, 4)
COST = tp.CallableCost(lambda l, c, b: 1.0 * l, lambda l, c, b: 2.0 * l)
SCHEDULE = tp.build_schedule("seq1f1b-zb", 2, "[(1, [20, 12])] * 4")
KNOWN = tp.simulate(SCHEDULE, COST, memory=tp.MemoryModel(MODEL))
UNITS = tp.simulate(SCHEDULE, COST)
MIB = 2.0**20


def texts(fig) -> list[str]:
    return [annotation.text for annotation in fig.layout.annotations]


class TestLines:
    def test_a_line_a_rank_from_its_weights_to_its_weights_over_its_peak(self):
        fig = tp.plots.memory(KNOWN)
        assert [trace.name for trace in fig.data] == ["rank 0", "rank 1"]
        for rank, trace in enumerate(fig.data):
            weights = KNOWN.memory["weight_bytes"][KNOWN.memory["rank"] == rank].iloc[0] / MIB
            assert trace.line.shape == "hv"
            assert (trace.x[0], trace.x[-1]) == (0.0, KNOWN.makespan_ms)
            assert trace.y[0] == trace.y[-1] == pytest.approx(weights)
            assert max(trace.y) == pytest.approx(KNOWN.peak_bytes()[rank] / MIB)
            assert set(trace.x[1:-1]) <= set(KNOWN.frame["end_ms"])
        assert fig.layout.yaxis.title.text == "memory (MiB)"
        assert texts(fig) == [
            f"peak {KNOWN.peak_bytes().max() / MIB:.4g} MiB on rank {KNOWN.peak_bytes().idxmax()}",
            "simulated",
        ]

    def test_units_where_bytes_are_not_known_or_not_wanted(self):
        for fig in (tp.plots.memory(UNITS), tp.plots.memory(KNOWN, units=True), tp.plots.memory(UNITS.frame)):
            assert fig.layout.yaxis.title.text == "units held"
            assert [max(trace.y) for trace in fig.data] == UNITS.peak_in_flight().tolist()

    def test_a_panel_a_timeline_on_shared_axes_each_with_the_cap(self):
        cap = 3 * MIB
        fig = tp.plots.memory({"one": KNOWN, "other": KNOWN}, cap_bytes=cap)
        assert [trace.name for trace in fig.data] == ["rank 0", "rank 1"] * 2
        assert [trace.showlegend for trace in fig.data] == [True, True, False, False]
        assert [shape.y0 for shape in fig.layout.shapes] == [3.0, 3.0]
        assert {shape.yref for shape in fig.layout.shapes} == {"y", "y2"}
        assert fig.layout.shapes[0].label.text == "cap 3 MiB"
        assert fig.layout.yaxis.range[1] > 3.0


def test_parts_of_a_rank_add_up_to_what_it_holds():
    fig = tp.plots.memory(KNOWN, rank=1)
    assert [trace.name for trace in fig.data] == ["weights", "activations", "keys, values, their gradients", "weight queue"]
    total = np.sum([trace.y for trace in fig.data], axis=0)
    assert total == pytest.approx(tp.plots.memory(KNOWN).data[1].y)
    assert {trace.stackgroup for trace in fig.data} == {"parts"}


def test_below_a_timeline_on_its_time_axis():
    plain, fig = tp.plots.timeline(KNOWN), tp.plots.timeline(KNOWN, memory=True)
    assert [trace.legendgroup for trace in fig.data] == ["F", "I", "W", "rank 0", "rank 1"]
    assert {(trace.xaxis, trace.yaxis) for trace in fig.data[3:]} == {("x2", "y2")}
    assert fig.layout.xaxis2.matches == "x"
    assert fig.layout.xaxis2.range == fig.layout.xaxis.range == plain.layout.xaxis.range
    assert fig.layout.yaxis2.domain[1] < fig.layout.yaxis.domain[0]
    assert texts(fig) == texts(plain)
    units = tp.plots.timeline(UNITS, memory=True)
    assert units.layout.yaxis2.title.text == "units held"


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: tp.plots.memory(UNITS, cap_bytes=1), r"cap_bytes=1 needs bytes.*memory=MemoryModel"),
        (lambda: tp.plots.memory(UNITS, rank=0), r"rank=0 needs bytes"),
        (lambda: tp.plots.memory(KNOWN, rank=2), r"no rank 2 in every timeline; ranks: \[0, 1\]"),
        (lambda: tp.plots.memory(KNOWN, cap_bytes=0), "cap_bytes=0: needs a positive number"),
        (lambda: tp.plots.memory(KNOWN, step=3), "no step 3 in this timeline"),
        (lambda: tp.plots.memory({}), "no timeline to draw"),
        (lambda: tp.plots.memory("lots"), "'lots' is not a timeline"),
    ],
)
def test_it_refuses(draw, said):
    with pytest.raises(TimelineError, match=said):
        draw()
