"""Figures hold the numbers of the tables they draw. The figure's data is read, never its pixels, and no browser is needed."""

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

import terapipe as tp
from terapipe.errors import ExportError, SlicingError, TerapipeError, TimelineError
from terapipe.plots.style import KINDS, PARTS
from terapipe.timeline import BUDGET

COST = tp.CallableCost(lambda t, c, b: b * t * (1 + c / 64), lambda t, c, b: 2 * b * t * (1 + c / 64))
PAPER = "[(1, [776, 640, 632])] * 16"


def simulated(n_ranks: int = 3, n_slices: int = 4, n_microbatches: int = 2, seq_tokens: int = 32) -> tp.Timeline:
    return tp.simulate(tp.build_schedule("terapipe", n_ranks, tp.uniform_slicing(seq_tokens, n_slices, n_microbatches)), COST)


def zero_bubble() -> tp.Timeline:
    orders = {0: "0F0 0F1 0I0 0W0 0I1 0W1", 1: "1F0 1I0 1F1 1I1 1W0 1W1"}
    return tp.simulate(tp.Schedule.from_orders(orders, tp.uniform_slicing(8, 1, 2)), COST)


def steps(makespans: dict[int, float], source: str = "measured") -> tp.Timeline:
    """One action a step on each of two ranks; step → makespan."""
    rows = [
        {"source": source, "step": step, "rank": rank, "kind": "F", "microbatch": 0, "slice": 0, "start_ms": 1.0, "end_ms": end}
        for step, makespan in makespans.items()
        for rank, end in ((0, 1.0 + makespan / 2), (1, 1.0 + makespan))
    ]
    return tp.Timeline.from_frame(pd.DataFrame(rows))


def bars(fig: go.Figure) -> pd.DataFrame:
    """One row a bar: kind, lane, base, length, action, in the order of the traces."""
    tables = [
        pd.DataFrame(
            {
                "kind": trace.legendgroup,
                "lane": trace.y,
                "base": trace.base,
                "length": trace.x,
                "action": trace.customdata[:, 0],
                "tone": trace.marker.color,
            }
        )
        for trace in fig.data
    ]
    return pd.concat(tables, ignore_index=True)


def notes(fig: go.Figure, name: str) -> list[str]:
    return [note.text for note in fig.layout.annotations if note.name == name]


# timeline


def test_bars_of_3_us_and_1_5_ms_and_2_s_equal_the_frame_to_1e_9_on_a_linear_axis():
    frame = pd.DataFrame(
        {
            "rank": [0, 0, 1],
            "kind": ["F", "B", "F"],
            "microbatch": [0, 0, 0],
            "slice": [0, 0, 0],
            "start_ms": [0.0, 0.003, 0.003],
            "end_ms": [0.003, 1.503, 2000.003],
        }
    )
    fig = tp.plots.timeline(frame)
    drawn = bars(fig).sort_values(["lane", "base"])
    np.testing.assert_allclose(drawn["base"], frame["start_ms"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(drawn["length"], [0.003, 1.5, 2000.0], rtol=0, atol=1e-9)
    assert fig.layout.xaxis.type == "linear"
    assert "ms" in fig.layout.xaxis.title.text
    low, high = fig.layout.xaxis.range
    assert low <= 0
    assert high >= 2000.003


def test_every_action_is_one_bar_with_its_start_and_duration():
    timeline = simulated()
    drawn = bars(tp.plots.timeline(timeline)).sort_values(["lane", "base"], ignore_index=True)
    rows = timeline.frame.sort_values(["rank", "start_ms"], ignore_index=True)
    assert len(drawn) == len(rows) == 3 * 4 * 2 * 2
    assert drawn["kind"].tolist() == rows["kind"].tolist()
    np.testing.assert_array_equal(drawn["base"], rows["start_ms"])
    np.testing.assert_array_equal(drawn["length"], rows["end_ms"] - rows["start_ms"])
    texts = [f"{row.stage}{row.kind}{row.microbatch}.{row.slice}" for row in rows.itertuples()]
    assert drawn["action"].tolist() == texts


@pytest.mark.parametrize(("timeline", "kinds"), [(simulated(), ["F", "B"]), (zero_bubble(), ["F", "I", "W"])])
def test_each_kind_is_one_trace_in_the_order_of_the_legend_with_its_own_colours(timeline: tp.Timeline, kinds: list[str]):
    fig = tp.plots.timeline(timeline)
    assert [trace.legendgroup for trace in fig.data] == kinds
    for trace in fig.data:
        look = KINDS[trace.legendgroup]
        assert look.label in trace.name
        assert trace.marker.colorscale[0][1] == look.color


def test_ranks_are_lanes_with_rank_0_on_top_whatever_their_numbers():
    frame = simulated().frame.replace({"rank": {1: 5, 2: 9}})
    axis = tp.plots.timeline(frame).layout.yaxis
    assert list(axis.ticktext) == ["0", "5", "9"]
    assert axis.range[0] > axis.range[1]


def test_idle_time_is_one_bare_lane_a_rank_and_no_bar_has_a_shape_of_its_own():
    timeline = tp.simulate(tp.build_schedule("terapipe", 10, tp.uniform_slicing(1000, 100, 10)), COST)
    fig = tp.plots.timeline(timeline)
    assert sum(len(trace.x) for trace in fig.data) == 20_000
    assert len(fig.data) == 2
    assert len(fig.layout.shapes) == 10
    assert all(lane.layer == "below" and lane.x1 - lane.x0 == timeline.makespan_ms for lane in fig.layout.shapes)
    assert all(trace.text is None for trace in fig.data), "20,000 texts"


def test_slices_grow_paler_within_a_microbatch_and_whole_microbatches_take_turns():
    sliced = bars(tp.plots.timeline(simulated(1, 4, 2))).query("kind == 'F'")
    assert sliced["tone"].tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1] * 2)
    whole = bars(tp.plots.timeline(simulated(1, 1, 3))).query("kind == 'F'")
    assert whole["tone"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("n_slices", "n_microbatches", "texts"),
    [(2, 2, ["0.0", "0.1", "1.0", "1.1"]), (3, 1, ["0", "1", "2"]), (1, 3, ["0", "1", "2"])],
)
def test_bars_carry_microbatch_and_slice_or_the_one_that_varies(n_slices: int, n_microbatches: int, texts: list[str]):
    forward = tp.plots.timeline(simulated(1, n_slices, n_microbatches, 24)).data[0]
    assert forward.text.tolist() == texts


def test_the_hover_names_place_tokens_times_and_what_was_waited_for():
    timeline = simulated(2, 2, 1)
    backward = tp.plots.timeline(timeline).data[1]
    row = timeline.frame.query("rank == 0 and kind == 'B' and slice == 1").iloc[0]
    here = [hover for hover in backward.customdata if hover[0] == "0B0.1"]
    assert [list(hover) for hover in here] == [
        ["0B0.1", 0, 0, 1, 16, 16, row["start_ms"], row["end_ms"], "1B0.1", row["end_ms"] - row["start_ms"]]
    ]
    assert "waited for" in backward.hovertemplate
    assert "tokens" in backward.hovertemplate


def test_the_hover_is_silent_on_what_a_given_table_does_not_know():
    template = tp.plots.timeline(steps({0: 2.0}, "given").frame.assign(blocked_by="")).data[0].hovertemplate
    assert "tokens" not in template
    assert "waited" not in template


def test_the_critical_path_is_outlined_by_one_trace_above_the_bars():
    timeline = simulated(3, 4, 2)
    plain, fig = tp.plots.timeline(timeline), tp.plots.timeline(timeline, critical_path=True)
    assert fig.data[:-1] == plain.data
    outline, path = fig.data[-1], timeline.critical_path()
    assert outline.name == "critical path"
    assert outline.y.tolist() == path["rank"].tolist()
    assert list(outline.base) == path["start_ms"].tolist()
    assert (np.asarray(outline.base) + outline.x).tolist() == pytest.approx(path["end_ms"].tolist())
    assert outline.marker.color == "rgba(0,0,0,0)"


@pytest.mark.parametrize("source", ["simulated", "emulated", "measured", "given", "replayed", "replayed, emulated"])
def test_the_badge_is_the_source_and_the_header_states_makespan_and_bubble_fraction(source: str):
    fig = tp.plots.timeline(steps({0: 2.0}, source), title="mine")
    assert notes(fig, "badge") == [source]
    assert notes(fig, "header") == ["<b>mine</b>  ·  makespan 2 ms  ·  bubble fraction 25.0%"]


def test_an_instant_timeline_has_no_bubble_fraction_and_still_an_axis():
    fig = tp.plots.timeline(steps({0: 0.0}))
    assert "bubble" not in notes(fig, "header")[0]
    assert fig.layout.xaxis.range[0] < 1.0 < fig.layout.xaxis.range[1]


@pytest.mark.parametrize(
    ("makespans", "chosen"),
    [({0: 5.0, 1: 3.0, 2: 4.0}, 4.0), ({0: 5.0, 1: 3.0, 2: 4.0, 3: 6.0}, 4.0), ({-1: 90.0, 0: 5.0}, 5.0), ({-1: 90.0}, 90.0)],
)
def test_the_measured_step_with_the_lower_median_makespan_is_drawn(makespans: dict[int, float], chosen: float):
    assert bars(tp.plots.timeline(steps(makespans)))["length"].max() == chosen


def test_a_step_is_drawn_by_its_number_even_a_warm_up_step_and_the_header_says_which():
    timeline = steps({-1: 90.0, 0: 5.0, 1: 3.0})
    fig = tp.plots.timeline(timeline, step=-1)
    assert bars(fig)["length"].max() == 90.0
    assert notes(fig, "header")[0].endswith("step -1")
    assert notes(tp.plots.timeline(timeline), "header")[0].endswith("step 1, the median of 2")


def test_an_unknown_step_is_refused_with_the_steps_there_are():
    with pytest.raises(TimelineError, match=r"no step 7 .* available: -1, 0, 1"):
        tp.plots.timeline(steps({-1: 90.0, 0: 5.0, 1: 3.0}), step=7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (42, "42 is not a timeline"),
        (pd.DataFrame({"rank": [0]}), "needs the column"),
        (simulated().frame.iloc[:0], "at least one row"),
        (simulated().frame.assign(kind="R"), r"kinds \['R'\]"),
        (simulated().frame.assign(end_ms=np.inf), "times are not finite"),
    ],
)
@pytest.mark.parametrize("draw", [tp.plots.timeline, tp.plots.budget, lambda given: tp.plots.compare(given, given)])
def test_what_is_not_a_timeline_is_refused_with_the_value(draw, given: object, message: str):
    with pytest.raises(TimelineError, match=message):
        draw(given)


# compare


def test_compared_timelines_share_one_time_axis_and_one_legend():
    predicted, measured = simulated(2), steps({0: 5.0, 1: 500.0, 2: 6.0})
    fig = tp.plots.compare(predicted, measured, titles=["predicted", "measured"])
    assert fig.layout.xaxis.matches == "x2"
    assert fig.layout.xaxis.range == fig.layout.xaxis2.range
    assert fig.layout.xaxis.range[1] >= predicted.makespan_ms
    assert [trace.legendgroup for trace in fig.data] == ["F", "B", "F"]
    assert [trace.showlegend for trace in fig.data] == [True, True, False]
    assert [trace.yaxis for trace in fig.data] == ["y", "y", "y2"]
    assert notes(fig, "badge") == ["simulated", "measured"]
    assert [text.split("  ·  ")[0] for text in notes(fig, "header")] == ["<b>predicted</b>", "<b>measured</b>"]


def test_compare_takes_a_mapping_and_more_than_two():
    fig = tp.plots.compare({"GPipe": simulated(2, 1), "sliced": simulated(2, 4), "typed": zero_bubble().frame})
    assert [text.split("  ·  ")[0] for text in notes(fig, "header")] == ["<b>GPipe</b>", "<b>sliced</b>", "<b>typed</b>"]
    assert len(fig.layout.shapes) == 6
    shown = [trace.legendgroup for trace in fig.data if trace.showlegend]
    assert shown == ["F", "B", "I", "W"]


@pytest.mark.parametrize(
    ("timelines", "titles", "message"),
    [
        ([simulated()], None, "at least 2 timelines, 1 given"),
        ([{"a": simulated()}], None, "at least 2 timelines, 1 given"),
        ([simulated()] * 2, ["a"], r"1 titles \['a'\] for 2"),
        ([{"a": simulated(), "b": simulated()}], ["c", "d"], "beside a mapping"),
    ],
)
def test_compare_refuses_one_timeline_and_titles_that_do_not_fit(timelines, titles, message: str):
    with pytest.raises(TimelineError, match=message):
        tp.plots.compare(*timelines, titles=titles)


# slicing


def test_bars_of_a_slicing_add_up_to_seq_tokens_and_equal_microbatches_are_one_row():
    fig = tp.plots.slicing(PAPER)
    (trace,) = fig.data
    assert trace.x.tolist() == [776, 640, 632]
    assert list(trace.base) == [0, 776, 1416]
    assert sum(trace.x) == 2048
    assert trace.text.tolist() == trace.x.tolist()
    assert ["×16" in label for label in fig.layout.yaxis.ticktext] == [True]
    assert "tokens" in fig.layout.xaxis.title.text


def test_unlike_microbatches_have_a_row_each_in_their_order():
    fig = tp.plots.slicing("[(1, [4, 4])] * 2 + [(3, [8])] + [(1, [4, 4])]")
    (trace,) = fig.data
    assert trace.y.tolist() == [0, 0, 1, 2, 2]
    assert pd.Series(trace.x).groupby(trace.y).sum().tolist() == [8, 8, 8]
    labels = fig.layout.yaxis.ticktext
    assert "microbatches 0…1  ×2" in labels[0]
    assert "microbatch 2, 3 sequences, whole" in labels[1]
    assert "microbatch 3" in labels[2]


def test_a_plan_states_objective_latency_and_bound():
    plan = tp.optimal_slicing(COST, 32, 4)
    fig = tp.plots.slicing(plan)
    assert fig.data[0].x.tolist() == list(plan.slicing.microbatches[0].slice_tokens)
    (text,) = notes(fig, "header")
    assert f"latency {plan.latency_ms:.4g} ms" in text
    assert f"lower bound {plan.lower_bound_ms:.4g} ms" in text
    assert "two-phase" in text


def test_a_search_states_step_bound_and_schedule_and_whether_it_is_extrapolated():
    found = tp.search_slicing(COST, 32, 4, 2)
    fig = tp.plots.slicing({"found": found, "even": tp.uniform_slicing(32, 4)})
    assert list(found.slicing.microbatches[0].slice_tokens) == fig.data[0].x[fig.data[0].y == 0].tolist()
    (text,) = notes(fig, "header")
    for fact in ("<b>found</b>", f"step {found.makespan_ms:.4g} ms", 'schedule "seq1f1b"', "4 ranks"):
        assert fact in text
    assert f"lower bound {found.lower_bound_ms:.4g} ms" in text
    assert not notes(fig, "badge")
    assert notes(tp.plots.slicing(replace(found, extrapolated=True)), "badge") == ["extrapolated cost"]


@pytest.mark.parametrize(
    ("holds_for", "said"), [("", "no lower bound known"), ("costs where cutting saves no time", "ms (not for any cost)")]
)
def test_a_searchs_bound_that_does_not_hold_for_any_cost_is_marked(holds_for, said):
    found = replace(tp.search_slicing(COST, 32, 4), bound_holds_for=holds_for)
    assert said in notes(tp.plots.slicing(found), "header")[0]


def test_named_slicings_of_any_form_stand_below_each_other():
    plan = tp.optimal_slicing(COST, 32, 4)
    fig = tp.plots.slicing({"best": plan, "even": tp.uniform_slicing(32, 4), "text": "[(1, [16, 16])]"})
    (trace,) = fig.data
    assert pd.Series(trace.x).groupby(trace.y).sum().tolist() == [32, 32, 32]
    assert [label.split("<br>")[0] for label in fig.layout.yaxis.ticktext] == ["<b>best</b>", "<b>even</b>", "<b>text</b>"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "7 is not a slicing"),
        ("[(1, [3, ])]", "whole number"),
        ({}, "no slicing given"),
        ({"a": [1, 2]}, "is not a slicing"),
    ],
)
def test_what_is_not_a_slicing_is_refused_with_the_value(given: object, message: str):
    with pytest.raises(SlicingError, match=message):
        tp.plots.slicing(given)


# budget


def test_budget_bars_add_up_to_ranks_times_makespan_where_compute_is_split_and_where_it_is_not():
    timelines = {"GPipe": simulated(4, 1), "TeraPipe": simulated(3, 4), "measured": steps({0: 2.0, 1: 4.0})}
    fig = tp.plots.budget(timelines)
    assert [trace.name for trace in fig.data] == [name.replace("_", " ") for name in BUDGET]
    assert list(BUDGET) == list(PARTS)
    totals = np.sum([trace.x for trace in fig.data], axis=0)
    expected = [each.n_ranks * each.makespan_ms for each in timelines.values()]
    np.testing.assert_allclose(totals, expected, rtol=1e-12)
    np.testing.assert_allclose(np.sum([trace.customdata for trace in fig.data], axis=0), 1, rtol=1e-12)
    assert fig.layout.barmode == "relative"
    assert notes(fig, "badge") == ["simulated", "simulated", "measured"]
    texts = {trace.name: list(trace.text) for trace in fig.data}
    assert [text != "" for text in texts["compute"]] == [False, False, True]
    assert [text != "" for text in texts["useful"]] == [True, True, False]
    assert texts["contention"] == ["0.0%", "0.0%", ""]


def test_a_budget_of_one_timeline_equals_timeline_budget_and_has_no_other_parts():
    timeline = simulated()
    fig = tp.plots.budget(timeline)
    expected = {name.replace("_", " "): part for name, part in timeline.budget().items()}
    assert {trace.name: trace.x[0] for trace in fig.data} == pytest.approx(expected)


def test_a_measured_budget_is_split_where_cost_and_contention_are_given():
    measured = tp.Timeline.from_frame(simulated().frame.assign(source="measured"))
    fig = tp.plots.budget(measured, COST, 1.5)
    expected = {name.replace("_", " "): part for name, part in measured.budget(COST, 1.5).items()}
    assert {trace.name: trace.x[0] for trace in fig.data} == pytest.approx(expected)
    assert "contention" in expected


def test_parts_below_0_stand_left_of_0():
    """A forward takes the square of its tokens: slices are faster than the whole."""
    square = tp.CallableCost(lambda l, c, b: l**2, lambda l, c, b: l**2)
    timeline = tp.simulate(tp.build_schedule("terapipe", 2, tp.uniform_slicing(8, 4)), square)
    fig = tp.plots.budget(timeline)
    assert timeline.budget()["slicing_overhead"] < 0
    assert fig.layout.xaxis.range[0] < timeline.budget()["slicing_overhead"]
    assert fig.layout.xaxis.range[1] > timeline.budget().clip(lower=0).sum()


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(TimelineError, match="at least one title"):
        tp.plots.budget({})


# save


@pytest.fixture
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "platform", "linux")


def fake_kaleido(monkeypatch: pytest.MonkeyPatch, calc_fig_sync) -> None:
    """A kaleido that needs no browser, and a program that stands for one."""
    module = ModuleType("kaleido")
    module.__spec__ = ModuleSpec("kaleido", None)
    module.calc_fig_sync = calc_fig_sync
    monkeypatch.setitem(sys.modules, "kaleido", module)
    monkeypatch.setenv("BROWSER_PATH", sys.executable)


@pytest.mark.usefixtures("no_browser")
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_without_a_browser_is_an_error_that_names_both_remedies(tmp_path: Path, suffix: str):
    path = tmp_path / f"figure.{suffix}"
    with pytest.raises(TerapipeError) as caught:
        tp.plots.save(tp.plots.timeline(simulated()), path)
    message = str(caught.value)
    assert 'pip install "terapipe[export]"' in message
    assert "chromium" in message
    assert "figure.html" in message
    assert not path.exists()


@pytest.mark.usefixtures("no_browser")
def test_html_and_json_need_no_browser(tmp_path: Path):
    fig = tp.plots.timeline(simulated())
    page = tp.plots.save(fig, tmp_path / "new" / "figure.html")
    assert len(page.read_text("utf-8")) > 1_000_000, "plotly.js is inside"
    data = tp.plots.save(fig, str(tmp_path / "figure.JSON"))
    assert [trace["legendgroup"] for trace in json.loads(data.read_text("utf-8"))["data"]] == ["F", "B"]


def test_a_picture_without_kaleido_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROWSER_PATH", sys.executable)
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(ExportError, match=r"kaleido is not installed.*terapipe\[export\].*figure\.html"):
        tp.plots.save(go.Figure(), tmp_path / "figure.png")


def test_kaleido_is_told_the_browser_and_the_size_of_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    fake_kaleido(monkeypatch, lambda fig, opts, kopts: calls.append((opts, kopts)) or b"picture")
    fig = tp.plots.timeline(simulated())
    assert tp.plots.save(fig, tmp_path / "figure.png").read_bytes() == b"picture"
    ((options, browser_options),) = calls
    assert options == {"format": "png", "width": 1000, "height": fig.layout.height, "scale": 2}
    assert browser_options == {"path": sys.executable, "mathjax": False}


def test_a_browser_that_fails_is_an_error_that_names_it_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_, **__):
        raise RuntimeError("it closed at once")

    fake_kaleido(monkeypatch, fail)
    with pytest.raises(ExportError, match=r"failed: RuntimeError: it closed at once.*chromium"):
        tp.plots.save(go.Figure(), tmp_path / "figure.svg")
    assert not (tmp_path / "figure.svg").exists()


@pytest.mark.parametrize("name", ["figure.gif", "figure"])
def test_an_unknown_suffix_is_refused_with_those_allowed(tmp_path: Path, name: str):
    with pytest.raises(ExportError, match=r"Allowed: \.html, \.json, \.png, \.svg, \.pdf"):
        tp.plots.save(go.Figure(), tmp_path / name)


def test_save_refuses_what_is_not_a_figure(tmp_path: Path):
    with pytest.raises(ExportError, match="'text' is not a plotly figure"):
        tp.plots.save("text", tmp_path / "figure.html")


# find_browser


@pytest.mark.usefixtures("no_browser")
def test_find_browser_finds_nothing_on_an_empty_path():
    assert tp.plots.find_browser() is None


@pytest.mark.skipif(sys.platform == "win32", reason="programs have a suffix there")
@pytest.mark.usefixtures("no_browser")
def test_find_browser_takes_what_is_on_path_and_browser_path_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tp.plots.find_browser() == str(program)
    monkeypatch.setenv("BROWSER_PATH", sys.executable)
    assert tp.plots.find_browser() == sys.executable
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "absent"))
    assert tp.plots.find_browser() is None


@pytest.mark.usefixtures("no_browser")
def test_a_wrong_browser_path_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chrome")
    with pytest.raises(ExportError, match="BROWSER_PATH='/nowhere/chrome' is not a program"):
        tp.plots.save(go.Figure(), tmp_path / "figure.png")


@pytest.mark.parametrize(("platform", "variable"), [("darwin", None), ("win32", "PROGRAMFILES")])
@pytest.mark.usefixtures("no_browser")
def test_find_browser_looks_in_the_usual_places_of_macos_and_windows(
    monkeypatch: pytest.MonkeyPatch, platform: str, variable: str | None
):
    asked = []
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("terapipe.plots.export.shutil.which", asked.append)
    if variable:
        monkeypatch.setenv(variable, r"C:\Program Files")
    assert tp.plots.find_browser() is None
    assert any("Google" in place and "Chrome" in place for place in asked)
