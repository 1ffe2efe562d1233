"""Figures of costs, of the slicing DP's trade and of a fit's errors; and the mark of extrapolated costs in every figure."""

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from test_plots import notes

import terapipe as tp
from terapipe.errors import CostError, SlicingError
from terapipe.plots import style

COST = tp.CallableCost(lambda l, c, b: 8 + b * l * (1 + c / 64), lambda l, c, b: 16 + 2 * b * l * (1 + c / 64))
LENGTHS, CONTEXTS = (8, 16, 32, 64), (0, 16, 32, 64)


def points() -> pd.DataFrame:
    """Times by COST on a grid within 96 tokens."""
    rows = [(l, c) for l in LENGTHS for c in CONTEXTS if l + c <= 96]
    frame = pd.DataFrame(rows, columns=["slice_tokens", "context_tokens"])
    where = (frame["slice_tokens"].to_numpy(), frame["context_tokens"].to_numpy())
    return frame.assign(forward_ms=COST.forward_ms(*where), backward_ms=COST.backward_ms(*where))


def profile(n_repeats: int = 3, n_stages: int = 2, only_first: bool = False) -> tp.Profile:
    """Each repeat 10 % slower than the one before; other ranks' times, which no figure shows, are ten times as long."""
    alone = [
        points().assign(stage=stage, n_sequences=1, together=False, repeat=repeat).assign(factor=1 + 0.1 * repeat)
        for stage in range(n_stages)
        for repeat in range(n_repeats)
    ]
    together = points().assign(stage=0, n_sequences=1, together=True, repeat=0, factor=10.0)
    frame = pd.concat([*alone, together], ignore_index=True)
    frame = frame.assign(**{name: frame[name] * frame["factor"] for name in ("forward_ms", "backward_ms")})
    return tp.Profile(frame[frame["context_tokens"] == 0] if only_first else frame)


def beyond() -> tp.TableCost:
    return tp.TableCost(points(), extrapolate=True)


def lines(fig: go.Figure, dashed: bool = False) -> dict[int, go.Scatter]:
    """The lines of the first panel by context."""
    wanted = "dash" if dashed else None
    found = [t for t in fig.data if t.mode == "lines" and t.line.dash == wanted and t.xaxis in (None, "x")]
    return {trace.meta: trace for trace in found}


def markers(fig: go.Figure) -> list[go.Scatter]:
    return [trace for trace in fig.data if trace.mode == "markers"]


# t_max


@pytest.mark.parametrize("n_stages", [1, 2, 48])
def test_the_curve_over_t_max_is_three_lines_and_a_marker_at_the_least(n_stages: int):
    curve = tp.t_max_curve(COST, 64, n_stages)
    fig = tp.plots.t_max(curve)
    total, waiting, latency, least = fig.data
    np.testing.assert_array_equal(total.y, curve["sum_ms"])
    np.testing.assert_array_equal(waiting.y, curve["waiting_ms"])
    np.testing.assert_allclose(np.add(total.y, waiting.y), latency.y)
    assert waiting.name == f"(K−1)·t_max, K = {n_stages}"
    plan = tp.optimal_slicing(COST, 64, n_stages, objective="paper")
    assert (least.x[0], least.y[0]) == (plan.t_max_ms, pytest.approx(plan.latency_ms))
    assert least.y[0] == latency.y.min()


def test_the_header_and_the_hover_of_the_least_state_t_max_latency_and_slices():
    curve = tp.t_max_curve(COST, 64, 8)
    best = curve[curve["optimal"]].iloc[0]
    fig = tp.plots.t_max(curve)
    for text in (notes(fig, "header")[0], fig.data[-1].hovertemplate):
        assert f"t_max {best['t_max_ms']:.4g} ms" in text
        assert f"latency {best['latency_ms']:.4g} ms" in text
        assert f"{best['n_slices']} slices" in text
    assert [axis.title.text[-4:] for axis in (fig.layout.xaxis, fig.layout.yaxis)] == ["(ms)", "(ms)"]


def test_t_max_is_on_a_logarithmic_axis_where_it_spans_much():
    curve = tp.t_max_curve(COST, 640, 8, granularity_tokens=10)
    assert tp.plots.t_max(curve).layout.xaxis.type == "log"
    assert tp.plots.t_max(curve[curve["t_max_ms"] < 2 * curve["t_max_ms"].min()]).layout.xaxis.type == "linear"


def test_a_part_of_the_curve_without_its_least_has_no_marker():
    curve = tp.t_max_curve(COST, 64, 8)
    assert [trace.mode for trace in tp.plots.t_max(curve[~curve["optimal"]]).data] == ["lines"] * 3


@pytest.mark.parametrize("given", [7, pd.DataFrame({"t_max_ms": [1.0]}), pd.DataFrame(columns=["t_max_ms"])])
def test_what_is_not_a_curve_over_t_max_is_refused(given: object):
    with pytest.raises(SlicingError, match=r"sum_ms.*use tp\.t_max_curve"):
        tp.plots.t_max(given)


def test_an_empty_curve_is_refused():
    with pytest.raises(SlicingError, match="it needs rows"):
        tp.plots.t_max(tp.t_max_curve(COST, 64, 8).iloc[:0])


# cost_surface


@pytest.mark.parametrize("kind", ["forward", "backward", "step"])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_line_is_what_the_cost_answers_at_every_length_that_fits_behind_its_context(kind: str, per_token: bool):
    fig = tp.plots.cost_surface(COST, 64, kind=kind, per_token=per_token)
    drawn = lines(fig)
    assert sorted(drawn) == [0, 16, 32, 48]
    for context, trace in drawn.items():
        times = getattr(COST, f"{kind}_ms")(trace.x, np.full_like(trace.x, context))
        np.testing.assert_allclose(trace.y, times / trace.x if per_token else times)
        assert (trace.x.min(), trace.x.max()) == (1, 64 - context)
    assert fig.layout.yaxis.title.text.endswith("(ms per token)" if per_token else "(ms)")
    assert fig.layout.xaxis.title.text == "slice length (tokens)"
    assert notes(fig, "badge") == ["formula"]


def test_contexts_and_the_number_of_sequences_can_be_chosen():
    fig = tp.plots.cost_surface(COST, 64, context_tokens=[40, 8], n_sequences=3, per_token=True)
    assert sorted(lines(fig)) == [8, 40]
    np.testing.assert_allclose(lines(fig)[8].y, COST.step_ms(lines(fig)[8].x, 8, 3) / (3 * lines(fig)[8].x))


def test_later_slices_have_darker_lines():
    colors = [[int(part) for part in t.line.color[4:-1].split(",")] for t in lines(tp.plots.cost_surface(COST, 64)).values()]
    luminance = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in colors]
    assert luminance == sorted(luminance, reverse=True)


def test_a_profile_is_its_medians_as_markers_and_its_fit_as_lines():
    given = profile()
    fig = tp.plots.cost_surface(given)
    (measured,) = markers(fig)
    medians = given.medians()
    np.testing.assert_array_equal(measured.x, medians["slice_tokens"])
    np.testing.assert_array_equal(measured.customdata[:, 0], medians["context_tokens"])
    np.testing.assert_allclose(measured.y, medians["forward_ms"] + medians["backward_ms"])
    assert measured.name == "measured, 3 repeats, mean of 2 stages"
    assert notes(fig, "badge") == ["fitted, eq. (9)"]
    first = lines(fig)[0]
    answered = np.isfinite(first.y)
    assert (first.x[answered].min(), first.x[answered].max()) == (8, 64), "beyond, eq. (9) refuses"
    np.testing.assert_allclose(first.y[answered], given.fit().step_ms(first.x[answered], 0))


def test_markers_follow_kind_and_per_token():
    medians = profile().medians()
    (measured,) = markers(tp.plots.cost_surface(profile(), kind="forward", per_token=True))
    np.testing.assert_allclose(measured.y, medians["forward_ms"] / medians["slice_tokens"])


def test_a_profile_that_cannot_be_fitted_is_drawn_with_straight_lines_that_say_so():
    fig = tp.plots.cost_surface(profile(only_first=True, n_stages=1), context_tokens=[0])
    assert notes(fig, "badge") == ["measured, linear between points"]
    assert markers(fig)[0].name == "measured, 3 repeats"


def test_a_table_has_its_points_as_markers_and_no_line_beyond_them():
    fig = tp.plots.cost_surface(tp.TableCost(points()), 128)
    assert notes(fig, "badge") == ["table, linear between points"]
    assert len(markers(fig)[0].x) == len(points())
    assert not lines(fig, dashed=True)
    assert np.isnan(lines(fig)[0].y[lines(fig)[0].x > 64]).all()


def test_extrapolated_parts_are_dashed_meet_the_rest_and_carry_a_badge():
    cost = beyond()
    fig = tp.plots.cost_surface(cost, 128, context_tokens=[0, 16])
    for context, dashed in lines(fig, dashed=True).items():
        known = lines(fig)[context]
        outside = cost.is_extrapolated(dashed.x, context)
        assert outside.any()
        np.testing.assert_array_equal(np.isnan(known.y), outside)
        assert np.isfinite(dashed.y[outside]).all()
        assert (np.isfinite(dashed.y) & ~outside).sum() == 2, "one neighbour at either end"
    source, mark = (note for note in fig.layout.annotations if note.name == "badge")
    assert (source.text, mark.text, mark.bgcolor) == ("table, linear between points", "extrapolated", style.WARNING)
    dashed = [point for line in lines(fig, dashed=True).values() for point in zip(line.x, line.y, strict=True)]
    assert (mark.x, mark.y) in [(np.log10(x), np.log10(y)) for x, y in dashed], "the badge is on a dashed line"


def test_nothing_is_dashed_within_the_table():
    fig = tp.plots.cost_surface(beyond(), context_tokens=[0], seq_tokens=64)
    inside = tp.plots.cost_surface({"a": COST, "b": COST}, 64)
    assert lines(fig, dashed=True), "below 8 tokens"
    assert not lines(inside, dashed=True)
    assert notes(inside, "badge") == ["formula", "formula"]


def test_a_fit_is_dashed_beyond_what_was_measured_and_a_profile_nowhere():
    assert not lines(tp.plots.cost_surface(profile()), dashed=True)
    fig = tp.plots.cost_surface(profile().fit(), 128, context_tokens=[0, 64])
    assert notes(fig, "badge") == ["fitted, eq. (9)", "extrapolated"]
    assert list(lines(fig, dashed=True)) == [64]
    known = lines(fig)[64]
    assert known.x[np.isfinite(known.y)].max() <= 32 < known.x.max()
    others = tp.plots.cost_surface(profile().fit(), n_sequences=2)
    assert not any(np.isfinite(line.y).any() for line in lines(others).values()), "measured with one sequence"


def test_a_table_is_drawn_at_every_number_of_sequences_it_answers():
    fig = tp.plots.cost_surface(beyond(), n_sequences=2)
    assert not markers(fig)
    first = lines(fig, dashed=True)[0]
    np.testing.assert_allclose(first.y, beyond().step_ms(first.x, 0, 2))
    assert first.x.max() == 96
    assert "extrapolated" in notes(fig, "badge")
    both = tp.TableCost(pd.concat([points().assign(n_sequences=n) for n in (1, 4)]))
    assert not lines(tp.plots.cost_surface(both, n_sequences=2), dashed=True), "between two numbers it is linear"


def test_several_costs_have_a_panel_each_on_the_same_axes_and_one_legend():
    fig = tp.plots.cost_surface({"measured": profile(), "table": beyond(), "typed": COST})
    assert notes(fig, "header") == ["<b>measured</b>", "<b>table</b>", "<b>typed</b>"]
    ranges = [(fig.layout[f"xaxis{n}"].range, fig.layout[f"yaxis{n}"].range) for n in ("", "2", "3")]
    assert ranges == ranges[:1] * 3
    listed = [trace.name for trace in fig.data if trace.showlegend is not False]
    assert len(listed) == len(set(listed))
    assert lines(fig)[0].x.max() == 96, "as far as the profile reaches"


@pytest.mark.parametrize(
    ("cost", "origin", "seq_tokens"),
    [
        (tp.RooflineCost(tp.ModelConfig(2, 64, 2, max_seq_tokens=256), "V100 16GB"), "formula, a lower bound", 256),
        (profile().fit(), "fitted, eq. (9)", 96),
        (tp.TransferCost(profile().fit(), tp.Link(1.0), 2), "fitted, eq. (9), with messages", 96),
        (replace(profile().fit(), seq_tokens=None), "fitted, eq. (9)", 64),
        (tp.TransferCost(beyond(), tp.Link(1.0), 2), "table, linear between points, with messages", 96),
    ],
)
def test_a_cost_that_knows_how_far_it_reaches_is_drawn_so_far_and_says_what_it_is(cost: tp.CostModel, origin: str, seq_tokens):
    fig = tp.plots.cost_surface(cost)
    assert notes(fig, "badge")[0] == origin
    assert lines(fig)[0].x.max() == seq_tokens


def test_a_forbidden_slice_is_a_gap():
    cost = tp.CallableCost(lambda l, c, b: np.where(l == 5, np.inf, l), lambda l, c, b: l)
    first = lines(tp.plots.cost_surface(cost, 16))[0]
    assert first.x[np.isnan(first.y)].tolist() == [5]


def test_free_slices_are_drawn_on_a_linear_axis():
    assert (
        tp.plots.cost_surface(tp.CallableCost(lambda l, c, b: 0.0, lambda l, c, b: l - 1.0), 64).layout.yaxis.type == "linear"
    )


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (7, {"seq_tokens": 8}, "7 is not a cost"),
        ({}, {}, "no cost given"),
        ({"a": "text"}, {"seq_tokens": 8}, "'text' is not a cost"),
        (COST, {}, "seq_tokens is needed"),
        (COST, {"seq_tokens": 0}, "seq_tokens=0"),
        (COST, {"seq_tokens": 8, "kind": "wgrad"}, "wgrad"),
        (COST, {"seq_tokens": 8, "context_tokens": [8]}, r"context_tokens=\[8\]"),
        (COST, {"seq_tokens": 8, "context_tokens": []}, r"context_tokens=\[\]"),
        (COST, {"seq_tokens": 8, "n_sequences": 0}, "n_sequences=0"),
        (profile(), {"n_sequences": 2}, r"n_sequences=2 .* \[1\]"),
        (tp.TableCost(points()), {"n_sequences": 2}, r"n_sequences=2 .* \[1\]"),
        (tp.TableCost(points()), {"seq_tokens": 7}, "nothing to draw"),
    ],
)
def test_what_cannot_be_drawn_as_a_cost_is_refused(given: object, options: dict[str, object], message: str):
    with pytest.raises(CostError, match=message):
        tp.plots.cost_surface(given, **options)


# residuals


def test_residuals_are_the_signed_held_out_errors_over_slice_length_coloured_by_context():
    given = profile()
    fig = tp.plots.residuals(given)
    held = given.held_out_points()
    for kind, drawn in zip(("forward", "backward"), markers(fig), strict=True):
        rows = held[held["kind"] == kind]
        np.testing.assert_array_equal(drawn.x, rows["slice_tokens"])
        np.testing.assert_array_equal(drawn.marker.color, rows["context_tokens"])
        np.testing.assert_allclose(drawn.y, rows["predicted_ms"] / rows["measured_ms"] - 1)
    assert [trace.yaxis for trace in markers(fig)] == ["y", "y2"]
    assert fig.layout.coloraxis.colorbar.title.text == "context<br>(tokens)"
    assert fig.layout.yaxis.tickformat.endswith("%")


def test_the_noise_of_repeats_is_a_band_about_no_error():
    bands = [trace for trace in tp.plots.residuals(profile()).data if trace.fill == "toself"]
    assert len(bands) == 2
    for band in bands:
        half = len(band.y) // 2
        np.testing.assert_allclose(band.y[:half], -band.y[half:][::-1])
        np.testing.assert_allclose(band.y[:half], 0.05 / 1.1, rtol=1e-9)  # repeats at 1, 1.1, 1.2 of a time: quartiles ± 0.05
        assert band.x.min() < 8
        assert band.x.max() > 64
    assert [band.showlegend for band in bands] == [True, False]


def test_residuals_state_the_summary_of_held_out_error_and_how_often_was_measured():
    given = profile()
    fig = tp.plots.residuals(given)
    for text, (_, row) in zip(notes(fig, "header"), given.held_out_error().iterrows(), strict=True):
        assert text.startswith(f"<b>{row['kind']}</b>")
        assert f"median {row['median']:.1%}" in text
        assert f"below {row['p95']:.1%}" in text
    assert notes(fig, "badge") == ["measured, 3 repeats"]


def test_residuals_of_one_stage_are_those_of_its_own_fit():
    frame = profile().frame
    mixed = tp.Profile(frame.assign(forward_ms=frame["forward_ms"] * (1 + frame["stage"] * frame["slice_tokens"] % 3)))
    drawn = markers(tp.plots.residuals(mixed, stage=1))[0]
    rows = mixed.held_out_points(1).query("kind == 'forward'")
    np.testing.assert_allclose(drawn.y, rows["predicted_ms"] / rows["measured_ms"] - 1)


def test_repeats_that_differ_between_points_are_stated_as_a_range():
    frame = profile().frame
    fewer = tp.Profile(frame[(frame["repeat"] < 2) | (frame["slice_tokens"] > 8)])
    assert notes(tp.plots.residuals(fewer), "badge") == ["measured, 2…3 repeats"]


def test_what_is_not_a_profile_has_no_residuals():
    with pytest.raises(CostError, match=r"tp\.Profile\.load"):
        tp.plots.residuals(profile().frame)


# the mark of extrapolated costs


def extrapolated_timeline() -> tp.Timeline:
    return tp.simulate(tp.build_schedule("terapipe", 2, tp.uniform_slicing(128, 4)), beyond())


def test_a_simulation_beyond_the_table_is_marked_in_its_frame_and_every_figure():
    timeline = extrapolated_timeline()
    assert set(timeline.frame["source"]) == {"simulated, extrapolated"}
    within = tp.simulate(tp.build_schedule("terapipe", 2, tp.uniform_slicing(64, 4)), beyond())
    assert within.source == "simulated"
    for fig in (tp.plots.compare(within, timeline), tp.plots.budget({"a": within, "b": timeline})):
        badges = [note for note in fig.layout.annotations if note.name == "badge"]
        assert [badge.text for badge in badges] == ["simulated", "simulated, extrapolated"]
        assert [badge.bgcolor for badge in badges] == [style.SOURCES["simulated"], style.WARNING]
    assert notes(tp.plots.timeline(timeline.frame), "badge") == ["simulated, extrapolated"]


def test_one_extrapolated_stage_marks_the_whole_timeline():
    schedule = tp.build_schedule("terapipe", 2, tp.uniform_slicing(128, 4))
    assert tp.simulate(schedule, [COST, beyond()]).source == "simulated, extrapolated"
    assert tp.simulate(schedule, [COST, COST]).source == "simulated"


def test_an_extrapolated_simulation_is_simulated_and_has_no_runtime_in_its_budget():
    timeline = tp.simulate(
        tp.build_schedule("terapipe", 2, tp.uniform_slicing(128, 4)), beyond(), tp.Link(5.0, overlap=False), bytes_per_token=1
    )
    assert timeline.is_simulated
    assert timeline.budget()["runtime"] == 0
    assert timeline.budget()["communication"] > 0
    assert not tp.Timeline.from_frame(timeline.frame.assign(source="measured")).is_simulated


def test_a_plan_with_extrapolated_costs_carries_a_badge_beside_its_own_row():
    limits = {"granularity_tokens": 8, "min_slice_tokens": 8}
    within, outside = (tp.optimal_slicing(beyond(), length, 4, **limits) for length in (64, 128))
    assert (within.extrapolated, outside.extrapolated) == (False, True)
    fig = tp.plots.slicing({"within": within, "text": "[(1, [128])] + [(2, [128])]", "beyond": outside})
    (badge,) = (note for note in fig.layout.annotations if note.name == "badge")
    assert (badge.text, badge.y, badge.bgcolor) == ("extrapolated cost", 3, style.WARNING)
    assert fig.layout.margin.r >= 100
    assert not notes(tp.plots.slicing(within), "badge")
