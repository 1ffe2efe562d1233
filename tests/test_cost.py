"""Cost models answer for numbers and arrays alike, and refuse what they do not know."""

import json
import math
from dataclasses import asdict, fields, replace
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

import terapipe as tp
from terapipe.cost.profile import median_error
from terapipe.errors import CostError

LINEAR = tp.LinearContextCost(
    slice_tokens=(16, 32, 64, 128),
    forward_alone_ms=(2.0, 2.5, 4.0, 9.0),
    backward_alone_ms=(3.0, 4.5, 8.0, 17.0),
    forward_context=(0.05, 1e-3, 2e-3, 3e-5),
    backward_context=(0.07, 2e-3, 1e-3, 7e-5),
)
SPLIT = tp.CallableCost(lambda l, c, b: l + c, lambda l, c, b: 2.0 * l, lambda l, c, b: 0.5 * l)


def grid_frame(cost: tp.CostModel, lengths=(16, 32, 64, 128), contexts=(0, 16, 64, 128, 256), sequences=(1,)) -> pd.DataFrame:
    points = [(length, context, n) for length in lengths for context in contexts for n in sequences]
    frame = pd.DataFrame(points, columns=["slice_tokens", "context_tokens", "n_sequences"])
    where = frame["slice_tokens"].to_numpy(), frame["context_tokens"].to_numpy(), frame["n_sequences"].to_numpy()
    return frame.assign(forward_ms=cost.forward_ms(*where), backward_ms=cost.backward_ms(*where))


def profile_frame(cost: tp.CostModel, n_repeats=3, n_stages=1, together=None, **grid) -> pd.DataFrame:
    """What a noiseless machine would measure; `together`: times all ranks at once ÷ alone."""
    alone = grid_frame(cost, **grid).assign(together=False)
    frames = [alone]
    if together is not None:
        scaled = alone.assign(forward_ms=alone["forward_ms"] * together, backward_ms=alone["backward_ms"] * together)
        frames.append(scaled.assign(together=True))
    return pd.concat(
        [
            frame.assign(stage=stage, repeat=repeat)
            for frame in frames
            for stage in range(n_stages)
            for repeat in range(n_repeats)
        ],
        ignore_index=True,
    )


class TestImpossibleHalves:
    def test_a_weight_half_beyond_the_backward_is_refused_with_both_and_where(self):
        cost = tp.CallableCost(lambda l, c, b: l, lambda l, c, b: 2.0, lambda l, c, b: np.where(np.asarray(c) > 4, 3.0, 2.0))
        assert cost.input_ms(8, 4) == 0
        said = r"weight_ms of 3.0 ms is more than backward_ms of 2.0 ms at slice_tokens=8, context_tokens=6, n_sequences=1: the"
        for contexts in (6, np.array([0, 6, 7])):
            with pytest.raises(CostError, match=said):
                cost.input_ms(8, contexts)


class TestStageShare:
    def test_two_stages_of_half_a_cost_take_as_long_as_one_of_it(self):
        """One rank, nothing to wait for: every order of all layers takes Σ (F + B)."""
        slicing = "[(1, [4, 4])] * 2"
        whole = tp.simulate(tp.build_schedule("seq1f1b", 1, slicing), SPLIT).makespan_ms
        halves = tp.simulate(tp.build_schedule("looped-bfs", 1, slicing, 2), tp.StageShare(SPLIT, 2)).makespan_ms
        assert whole == halves == 2 * float(SPLIT.step_ms(4, 0) + SPLIT.step_ms(4, 4))

    @pytest.mark.parametrize("name", ["forward_ms", "backward_ms", "weight_ms", "input_ms"])
    def test_each_time_is_an_nth_and_extrapolation_is_the_wholes(self, name):
        lengths, contexts = np.array([16, 64]), np.array([[0], [32]])
        expected = getattr(LINEAR, name)(lengths, contexts, 2) / 4
        share = tp.StageShare(LINEAR, 4)
        np.testing.assert_array_equal(getattr(share, name)(lengths, contexts, 2), expected)
        beyond = [[16, 10**6]], [[0, 10**6]]
        np.testing.assert_array_equal(
            share.is_extrapolated(*map(np.array, beyond)), LINEAR.is_extrapolated(*map(np.array, beyond))
        )

    @pytest.mark.parametrize(("values", "said"), [((3, 2), "cost=3: needs a CostModel"), ((LINEAR, 0), "n_parts=0: needs an")])
    def test_it_refuses(self, values, said):
        with pytest.raises(CostError, match=said):
            tp.StageShare(*values)


class TestCallableCost:
    def test_a_number_in_gives_a_number_out_an_array_gives_an_array(self):
        cost = tp.CallableCost(lambda l, c, b: b * (l + c / 2), lambda l, c, b: 2 * b * l)
        assert float(cost.forward_ms(4, 6)) == 7.0
        assert np.shape(cost.forward_ms(4, 6)) == ()
        np.testing.assert_array_equal(cost.forward_ms(np.array([4, 8]), np.array([6, 0]), 2), [14.0, 16.0])
        np.testing.assert_array_equal(cost.backward_ms(np.array([[4], [8]]), np.array([0, 1, 2])), [[8.0] * 3, [16.0] * 3])

    def test_functions_are_called_by_position_with_slice_context_sequences(self):
        cost = tp.CallableCost(lambda *given: given[0] + 10 * given[1] + 100 * given[2], lambda *given: len(given))
        assert cost.forward_ms(1, 2, 3) == 321
        assert cost.forward_ms(1, 2) == 121
        assert cost.backward_ms(1, 2) == 3

    def test_a_constant_is_broadcast_to_every_argument(self):
        cost = tp.CallableCost(lambda l, c, b: 1.5, lambda l, c, b: l)
        np.testing.assert_array_equal(cost.forward_ms(np.arange(1, 4), 0), [1.5] * 3)
        np.testing.assert_array_equal(cost.backward_ms(np.arange(1, 3), np.zeros((3, 1))), [[1.0, 2.0]] * 3)

    def test_step_is_forward_plus_backward_and_backward_is_input_plus_weight(self):
        cost = tp.CallableCost(lambda l, c, b: l, lambda l, c, b: 3 * l, weight_ms=lambda l, c, b: l + 0.5)
        lengths = np.array([1, 5])
        np.testing.assert_array_equal(cost.step_ms(lengths, 0), [4.0, 20.0])
        np.testing.assert_array_equal(cost.weight_ms(lengths, 0), [1.5, 5.5])
        np.testing.assert_array_equal(cost.input_ms(lengths, 0), [1.5, 9.5])

    def test_without_a_weight_function_each_half_is_half_the_backward(self):
        cost = tp.CallableCost(lambda l, c, b: l, lambda l, c, b: 3.0 * l)
        assert cost.input_ms(5, 0) == cost.weight_ms(5, 0) == 7.5

    @pytest.mark.parametrize(("value", "said"), [(np.nan, "nan"), (-2.0, "-2.0"), (-np.inf, "-inf")])
    def test_nan_and_negative_times_are_refused_with_the_value_and_the_point(self, value, said):
        cost = tp.CallableCost(lambda l, c, b: np.where(l == 7, value, 1.0), lambda l, c, b: value)
        with pytest.raises(CostError, match=rf"{said} ms at slice_tokens=7, context_tokens=20, n_sequences=1"):
            cost.forward_ms(np.array([5, 7]), np.array([10, 20]))
        with pytest.raises(CostError, match=rf"{said} ms at slice_tokens=3, context_tokens=4, n_sequences=2"):
            cost.backward_ms(3, 4, 2)

    def test_infinity_is_a_time(self):
        cost = tp.CallableCost(lambda l, c, b: np.where(l > 2, np.inf, l), lambda l, c, b: l)
        np.testing.assert_array_equal(cost.forward_ms(np.array([2, 3]), 0), [2.0, np.inf])

    @pytest.mark.parametrize("name", ["forward_ms", "backward_ms", "weight_ms"])
    def test_what_is_no_function_is_refused_by_name(self, name):
        functions = {"forward_ms": lambda l, c, b: l, "backward_ms": lambda l, c, b: l, name: 3.0}
        with pytest.raises(CostError, match=rf"{name}=3\.0"):
            tp.CallableCost(**functions)

    @pytest.mark.parametrize(
        "function",
        [
            lambda l, c, b: max(l, 3),
            lambda l, c, b: l if l > 3 else 3,
            lambda l, c, b: math.sqrt(l),
        ],
    )
    def test_a_function_for_plain_numbers_is_told_that_it_gets_arrays_and_what_to_use(self, function):
        cost = tp.CallableCost(lambda l, c, b: l, function, function)
        assert cost.backward_ms(4, 0) > 0
        for name in ("backward_ms", "weight_ms"):
            with pytest.raises(
                CostError, match=rf"{name} raised .*numpy arrays: .*np\.maximum.*np\.where.*np\.sqrt"
            ) as refusal:
                getattr(cost, name)(np.array([2, 4]), 0)
            assert isinstance(refusal.value.__cause__, TypeError | ValueError)

    def test_other_errors_of_a_function_stay_its_own(self):
        def broken(l, c, b):
            raise KeyError("my own") if np.ndim(l) else ValueError("of a number")

        with pytest.raises(KeyError, match="my own"):
            tp.CallableCost(broken, broken).forward_ms(np.array([2, 4]), 0)
        with pytest.raises(ValueError, match=r"^of a number$"):
            tp.CallableCost(broken, broken).forward_ms(2, 0)

    def test_the_refusal_of_a_cost_inside_a_function_is_passed_on_as_it_is(self):
        cost = tp.CallableCost(lambda l, c, b: 5 * LINEAR.forward_ms(l, c, b), lambda l, c, b: l)
        with pytest.raises(CostError, match=r"^a slice of 8 tokens is outside"):
            cost.forward_ms(np.array([8, 16]), 0)

    @pytest.mark.parametrize("slices", [2, np.array([2, 3])])
    def test_complex_times_are_refused_not_cut(self, slices):
        cost = tp.CallableCost(lambda l, c, b: l * (1 + 2j), lambda l, c, b: l)
        with pytest.raises(CostError, match=r"complex numbers, \[2\.\+4\.j\]"):
            cost.forward_ms(slices, 0)

    @pytest.mark.filterwarnings("error")
    def test_a_forbidden_backward_forbids_both_halves(self):
        cost = tp.CallableCost(lambda l, c, b: l, lambda l, c, b: np.where(l > 2, np.inf, l))
        np.testing.assert_array_equal(cost.input_ms(np.array([2, 3]), 0), [1.0, np.inf])
        assert cost.input_ms(3, 0) == cost.weight_ms(3, 0) == np.inf

    def test_a_result_of_another_shape_is_refused_naming_both_shapes(self):
        cost = tp.CallableCost(lambda l, c, b: np.ones(3), lambda l, c, b: None)
        with pytest.raises(CostError, match=r"\(3,\).*\(2,\)"):
            cost.forward_ms(np.array([1, 2]), 0)
        with pytest.raises(CostError, match="nan"):
            cost.backward_ms(np.array([1, 2]), 0)


class TestTableCost:
    def test_a_point_of_the_table_is_returned_as_it_stands(self):
        rng = np.random.default_rng(0)
        frame = grid_frame(LINEAR, sequences=(1, 4))
        frame = frame.assign(
            forward_ms=rng.random(len(frame)), backward_ms=1 + rng.random(len(frame)), weight_ms=rng.random(len(frame))
        )
        cost = tp.TableCost(frame.sample(frac=1, random_state=0))
        where = [frame[name].to_numpy() for name in ("slice_tokens", "context_tokens", "n_sequences")]
        for name in ("forward_ms", "backward_ms", "weight_ms"):
            np.testing.assert_array_equal(getattr(cost, name)(*where), frame[name])
        assert (
            cost.forward_ms(16, 64, 4)
            == frame.query("slice_tokens == 16 and context_tokens == 64 and n_sequences == 4")["forward_ms"].item()
        )

    def test_between_its_points_a_plane_is_followed_exactly(self):
        plane = tp.CallableCost(lambda l, c, b: 1 + 0.5 * l + 0.25 * c, lambda l, c, b: 2 + 0.125 * l + 0.0625 * c)
        cost = tp.TableCost(grid_frame(plane))
        lengths, contexts = np.meshgrid(np.arange(16, 129, 7), np.arange(0, 257, 11))
        np.testing.assert_allclose(cost.forward_ms(lengths, contexts), plane.forward_ms(lengths, contexts), rtol=1e-12)
        np.testing.assert_allclose(cost.backward_ms(lengths, contexts), plane.backward_ms(lengths, contexts), rtol=1e-12)

    @pytest.mark.parametrize(
        ("point", "low", "high", "share"),
        [
            ((24, 0), (16, 0), (32, 0), 1 / 2),
            ((16, 40), (16, 16), (16, 64), 1 / 2),
            ((128, 160), (128, 128), (128, 256), 1 / 4),
            ((112, 256), (64, 256), (128, 256), 3 / 4),
        ],
    )
    def test_along_an_edge_it_is_linear_between_neighbours(self, point, low, high, share):
        cost = tp.TableCost(grid_frame(LINEAR))
        expected = (1 - share) * float(cost.forward_ms(*low)) + share * float(cost.forward_ms(*high))
        assert cost.forward_ms(*point) == pytest.approx(expected, rel=1e-12)

    def test_every_slice_of_a_measured_triangle_is_answered(self):
        """The slicing DP asks for every l + c ≤ L; the points measured are a coarse grid of it."""
        points = [(length, context) for length in range(3, 31, 3) for context in range(0, 31 - length, 3)]
        frame = pd.DataFrame(points, columns=["slice_tokens", "context_tokens"])
        frame = frame.assign(forward_ms=frame["slice_tokens"] * 0.7 + frame["context_tokens"] * 0.3, backward_ms=1.0)
        asked = np.array([(length, context) for length in range(3, 31) for context in range(31 - length)])
        times = tp.TableCost(frame).forward_ms(asked[:, 0], asked[:, 1])
        np.testing.assert_allclose(times, asked @ [0.7, 0.3], rtol=1e-9)

    def test_between_two_numbers_of_sequences_it_is_linear(self):
        frame = grid_frame(tp.CallableCost(lambda l, c, b: (l + c) * b**2, lambda l, c, b: l * b), sequences=(1, 2, 4))
        cost = tp.TableCost(frame)
        assert cost.forward_ms(16, 64, 3) == pytest.approx((80 * 4 + 80 * 16) / 2)
        np.testing.assert_allclose(cost.backward_ms(32, 16, np.array([1, 1.5, 2, 3, 4])), 32 * np.array([1, 1.5, 2, 3, 4]))

    @pytest.mark.parametrize(
        "point", [(8, 0, 1), (256, 0, 1), (16, 257, 1), (16, 0, 2), (16, 0, 0.5), (20, 300, 1), (20, 20, 3)]
    )
    def test_a_point_beyond_the_table_is_refused_with_its_reach(self, point):
        with pytest.raises(CostError) as refusal:
            tp.TableCost(grid_frame(LINEAR)).forward_ms(*point)
        said = str(refusal.value)
        assert f"slice_tokens={point[0]:g}, context_tokens={point[1]:g}, n_sequences={point[2]:g}" in said
        assert "16…128" in said
        assert "0…256" in said

    def test_points_on_one_line_are_interpolated_along_it_and_refused_beside_it(self):
        frame = pd.DataFrame(
            {"slice_tokens": [8, 16, 64], "context_tokens": 0, "forward_ms": [1.0, 2.0, 8.0], "backward_ms": 1.0}
        )
        cost = tp.TableCost(frame)
        assert cost.forward_ms(40, 0) == pytest.approx(5.0)
        with pytest.raises(CostError, match="context_tokens=1"):
            cost.forward_ms(40, 1)
        assert tp.TableCost(frame.iloc[:1]).forward_ms(8, 0) == 1.0
        with pytest.raises(CostError):
            tp.TableCost(frame.iloc[:1]).forward_ms(9, 0)

    def test_between_a_forbidden_point_and_its_neighbours_all_is_forbidden(self):
        frame = grid_frame(LINEAR)
        corner = (frame["slice_tokens"] == 128) & (frame["context_tokens"] == 256)
        cost = tp.TableCost(frame.assign(forward_ms=frame["forward_ms"].where(~corner, np.inf)))
        assert cost.forward_ms(128, 256) == np.inf
        np.testing.assert_array_equal(cost.forward_ms(np.array([128, 100, 127]), np.array([200, 256, 255])), np.inf)
        assert cost.forward_ms(32, 16) == LINEAR.forward_ms(32, 16)

    def test_weights_default_to_half_the_backward(self):
        cost = tp.TableCost(grid_frame(LINEAR))
        assert float(cost.weight_ms(16, 64)) == float(cost.input_ms(16, 64)) == float(cost.backward_ms(16, 64)) / 2

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda frame: frame.drop(columns="backward_ms"), "backward_ms"),
            (lambda frame: frame.drop(columns=["slice_tokens", "forward_ms"]), "slice_tokens"),
            (lambda frame: frame.iloc[:0], "at least one row"),
            (lambda frame: pd.concat([frame, frame.iloc[:1]]), "twice"),
            (lambda frame: frame.assign(forward_ms=frame["forward_ms"].where(frame.index != 2)), "NaN or negative"),
            (lambda frame: frame.assign(backward_ms=-frame["backward_ms"]), "NaN or negative"),
            (lambda frame: frame.assign(n_sequences=0), "n_sequences below 1.*'n_sequences': 0"),
            (lambda frame: frame.assign(slice_tokens=frame["slice_tokens"] - 16), "slice_tokens below 1.*'slice_tokens': 0"),
            (lambda frame: frame.assign(context_tokens=-1 - frame["context_tokens"]), "context_tokens below 0"),
            (lambda frame: frame.assign(weight_ms=2 * frame["backward_ms"]), "weight_ms longer than its backward_ms"),
            (lambda frame: frame.assign(weight_ms=np.inf), "weight_ms longer than its backward_ms.*'weight_ms': inf"),
        ],
    )
    def test_a_bad_table_is_refused_with_the_fault(self, change, said):
        with pytest.raises(CostError, match=said):
            tp.TableCost(change(grid_frame(LINEAR)))

    @pytest.mark.parametrize("given", ["costs.csv", {"slice_tokens": [1]}, None])
    def test_what_is_no_frame_is_refused_with_the_way_from_a_file_and_from_columns(self, given):
        with pytest.raises(
            CostError, match=r"frame=.*needs a DataFrame\. TableCost\.read_csv\(path\) reads a file.*pd\.DataFrame"
        ):
            tp.TableCost(given)

    def test_a_forbidden_backward_may_have_a_forbidden_weight_half(self):
        cost = tp.TableCost(grid_frame(LINEAR).assign(backward_ms=np.inf))
        assert cost.weight_ms(16, 0) == cost.input_ms(16, 0) == np.inf

    @pytest.mark.parametrize("where", [(0.5, 0), (100, 100, 3)])
    def test_the_refusal_names_the_way_to_extrapolate(self, where):
        with pytest.raises(CostError, match=r"TableCost\(…, extrapolate=True\)"):
            tp.TableCost(grid_frame(LINEAR)).forward_ms(*where)

    def test_beside_a_forbidden_point_an_edge_between_allowed_ones_is_allowed(self):
        frame = pd.DataFrame(
            {"slice_tokens": [8, 16, 8], "context_tokens": [0, 0, 8], "forward_ms": [1, 2, np.inf], "backward_ms": 1.0}
        )
        np.testing.assert_allclose(
            tp.TableCost(frame).forward_ms(np.array([12, 8, 10]), np.array([0, 4, 4])), [1.5, np.inf, np.inf]
        )

    def test_every_slice_of_2048_tokens_is_answered_at_once(self):
        ends, starts = np.tril_indices(2049, k=-1)
        lengths = [1, 16, 64, 128, 256, 512, 1024, 2048]
        points = sorted({(length, round((2048 - length) * share)) for length in lengths for share in (0, 0.25, 0.5, 1)})
        frame = pd.DataFrame(points, columns=["slice_tokens", "context_tokens"])
        frame = frame.assign(forward_ms=frame["slice_tokens"] + 0.5 * frame["context_tokens"], backward_ms=1.0)
        linear = tp.LinearContextCost((1, 2048), (1.0, 2048.0), (1.0, 1.0), forward_context=(0.0, 0.0, 0.5, 0.0))
        expected = ends - 0.5 * starts
        for cost in (tp.TableCost(frame), linear):
            np.testing.assert_allclose(cost.forward_ms(ends - starts, starts), expected, rtol=1e-9)


class TestExtrapolation:
    CAUSAL = tp.CallableCost(
        lambda l, c, b: b * (1 + l + c / 4 + l * (c + l / 2) / 64),
        lambda l, c, b: b * (2 + 2 * l + c / 2 + l * (c + l / 2) / 32),
    )

    def frame(self, **grid) -> pd.DataFrame:
        return grid_frame(self.CAUSAL, **grid)

    def test_beyond_the_table_a_causal_cost_is_recovered_from_a_table_of_it(self):
        cost = tp.TableCost(self.frame(), extrapolate=True)
        lengths, contexts = np.array([[1], [20], [500]]), np.array([0, 300, 4000])
        for kind in ("forward_ms", "backward_ms", "weight_ms"):
            beyond = cost.is_extrapolated(lengths, contexts)
            assert beyond.sum() == 8  # all but (20, 0)
            found, truth = (np.asarray(getattr(each, kind)(lengths, contexts)) for each in (cost, self.CAUSAL))
            np.testing.assert_allclose(found[beyond], truth[beyond], rtol=1e-9)

    def test_within_the_table_nothing_changes(self):
        frame = self.frame()
        plain, daring = tp.TableCost(frame), tp.TableCost(frame, extrapolate=True)
        lengths, contexts = np.meshgrid(np.arange(16, 129, 7), np.arange(0, 257, 11))
        np.testing.assert_array_equal(daring.forward_ms(lengths, contexts), plain.forward_ms(lengths, contexts))
        for cost in (plain, daring):
            assert not cost.is_extrapolated(lengths, contexts).any()

    def test_it_is_known_whether_or_not_it_is_allowed_and_for_numbers_and_arrays(self):
        cost = tp.TableCost(self.frame())
        assert isinstance(cost.is_extrapolated(16, 0), np.bool_)
        assert cost.is_extrapolated(15, 0)
        assert not cost.is_extrapolated(16, 0)
        np.testing.assert_array_equal(cost.is_extrapolated(16, 0, np.array([0.5, 1, 2])), [True, False, True])
        assert cost.is_extrapolated(np.zeros((2, 1)), np.zeros(3)).shape == (2, 3)

    def test_numbers_of_sequences_beyond_the_table_are_in_proportion_to_the_nearest(self):
        cost = tp.TableCost(self.frame(sequences=(2, 4)), extrapolate=True)
        assert cost.forward_ms(32, 64, 8) == pytest.approx(2 * cost.forward_ms(32, 64, 4))
        assert cost.forward_ms(32, 64, 1) == pytest.approx(cost.forward_ms(32, 64, 2) / 2)
        np.testing.assert_array_equal(
            cost.is_extrapolated(32, 64, np.array([1, 2, 3, 4, 8])), [True, False, False, False, True]
        )
        assert cost.forward_ms(500, 64, 3) == pytest.approx(self.CAUSAL.forward_ms(500, 64, 3), rel=1e-9)

    def test_a_fit_below_0_counts_as_0(self):
        falling = tp.CallableCost(lambda l, c, b: 300.0 - l - c / 2, lambda l, c, b: 1.0)
        assert tp.TableCost(grid_frame(falling), extrapolate=True).forward_ms(1000, 1000) == 0.0

    def test_forbidden_points_forbid_their_neighbours_and_are_left_out_of_the_fit(self):
        frame = self.frame()
        corner = (frame["slice_tokens"] == 128) & (frame["context_tokens"] == 256)
        cost = tp.TableCost(frame.assign(forward_ms=frame["forward_ms"].where(~corner, np.inf)), extrapolate=True)
        assert cost.forward_ms(127, 255) == np.inf
        assert cost.forward_ms(200, 300) == pytest.approx(self.CAUSAL.forward_ms(200, 300), rel=1e-9)

    def test_points_that_determine_no_plane_are_refused_only_when_asked_beyond_them(self):
        cost = tp.TableCost(self.frame(contexts=(0,)), extrapolate=True)
        assert cost.forward_ms(16, 0) == pytest.approx(self.CAUSAL.forward_ms(16, 0))
        assert cost.is_extrapolated(20, 1)
        with pytest.raises(CostError, match="4 points of the cost table do not determine"):
            cost.forward_ms(20, 1)

    def test_other_costs_extrapolate_nothing_unless_they_say_so(self):
        assert not self.CAUSAL.is_extrapolated(10**9, 0)
        np.testing.assert_array_equal(
            LINEAR.is_extrapolated(np.array([16, 32]), np.zeros((3, 1))), np.zeros((3, 2), dtype=bool)
        )


class TestReadCsv:
    def test_a_written_table_comes_back(self, tmp_path):
        frame = grid_frame(LINEAR, sequences=(1, 2))
        frame.to_csv(tmp_path / "costs.csv", index=False)
        cost = tp.TableCost.read_csv(tmp_path / "costs.csv")
        pd.testing.assert_frame_equal(cost.frame, tp.TableCost(frame).frame)
        assert not cost.extrapolate
        assert tp.TableCost.read_csv(str(tmp_path / "costs.csv"), extrapolate=True).forward_ms(1000, 0) > 0

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "is no CSV table"),
            ("slice_tokens,context_tokens,forward_ms\n1,0,1\n", r"column\(s\) \['backward_ms'\]"),
            ("slice_tokens,context_tokens,forward_ms,backward_ms\n1,0,1,2\n2,0,fast,2\n", "'fast' for forward_ms in row 1"),
            ("slice_tokens,context_tokens,forward_ms,backward_ms\n1,0,1,\n", "NaN or negative"),
            ("slice_tokens,context_tokens,forward_ms,backward_ms\n,0,1,2\n", "point that is no number"),
            ("slice_tokens,context_tokens,forward_ms,backward_ms\n1,0,1,2\n1,0,1,3\n", r"Profile\.load"),
        ],
    )
    def test_what_is_no_cost_table_is_refused_with_the_file_and_the_fault(self, tmp_path, text, said):
        (tmp_path / "costs.csv").write_text(text, "utf-8")
        with pytest.raises(CostError, match=said) as refusal:
            tp.TableCost.read_csv(tmp_path / "costs.csv")
        assert "costs.csv" in str(refusal.value)

    def test_a_missing_file_is_refused_by_name(self, tmp_path):
        with pytest.raises(CostError, match=r"nothing\.csv.*slice_tokens, context_tokens"):
            tp.TableCost.read_csv(tmp_path / "nothing.csv")


class TestLinearContextCost:
    def test_the_context_part_is_0_without_context_for_every_length(self):  # paper, eq. (9): t_ctx(l, 0) = 0
        lengths = np.array(LINEAR.slice_tokens)
        np.testing.assert_array_equal(LINEAR.forward_ms(lengths, 0), LINEAR.forward_alone_ms)
        np.testing.assert_array_equal(LINEAR.backward_ms(lengths, 0), LINEAR.backward_alone_ms)

    @given(length=st.integers(16, 128), context=st.integers(1, 10_000), n=st.integers(1, 8))
    @PROPERTY
    def test_eq_9_is_the_sum_of_both_parts_times_the_sequences(self, length, context, n):
        own = np.interp(length, LINEAR.slice_tokens, LINEAR.forward_alone_ms)
        a0, a1, a2, a3 = LINEAR.forward_context
        expected = n * (own + a0 + a1 * length + a2 * context + a3 * length * context)
        assert LINEAR.forward_ms(length, context, n) == pytest.approx(expected, rel=1e-12)

    def test_numbers_and_arrays_broadcast(self):
        assert np.shape(LINEAR.forward_ms(16, 16)) == ()
        both = LINEAR.backward_ms(np.array([[16], [100]]), np.array([0, 50, 100]), 2)
        assert both.shape == (2, 3)
        assert both[1, 2] == LINEAR.backward_ms(100, 100, 2)
        assert LINEAR.forward_ms(16, np.array([0, 1])).shape == (2,)

    def test_arrays_and_lists_become_tuples_of_plain_numbers(self):
        values = [getattr(LINEAR, each.name) for each in fields(LINEAR)[:5]]
        made = tp.LinearContextCost(*map(np.asarray, values), np.int64(1))
        assert made == LINEAR == tp.LinearContextCost(*map(list, values))
        assert hash(made) == hash(LINEAR)
        assert json.loads(json.dumps(asdict(made))) == json.loads(json.dumps(asdict(LINEAR)))

    def test_beyond_the_measured_sum_of_slice_and_context_it_is_extrapolated(self):
        cost = replace(LINEAR, seq_tokens=128)
        assert isinstance(cost.is_extrapolated(16, 112), np.bool_)
        np.testing.assert_array_equal(cost.is_extrapolated(np.array([16, 64, 128]), [[112], [64], [0], [113]]),
            [[False, True, True], [False, False, True], [False, False, False], [True, True, True]])  # fmt: skip
        np.testing.assert_array_equal(cost.is_extrapolated(16, 0, np.array([1, 2])), [False, True])
        assert not LINEAR.is_extrapolated(16, 10**6), "nothing is known of how far it was measured"

    @pytest.mark.parametrize("length", [15, 129, 1, 1e9])
    def test_a_length_beyond_the_measured_ones_is_refused_naming_them(self, length):
        with pytest.raises(CostError, match=rf"{length:g} tokens is outside the measured 16…128".replace("+", r"\+")):
            LINEAR.forward_ms(np.array([32.0, length]), 0)

    def test_a_negative_sum_counts_as_0(self):
        cost = tp.LinearContextCost((1, 8), (1.0, 1.0), (1.0, 1.0), forward_context=(0.0, 0.0, -1.0, 0.0))
        assert cost.forward_ms(4, 100) == 0.0

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (((), (), ()), r"slice_tokens=\(\)"),
            (((8, 4), (1.0, 1.0), (1.0, 1.0)), "ascending"),
            (((4, 4), (1.0, 1.0), (1.0, 1.0)), "distinct"),
            (((4, 8), (1.0,), (1.0, 1.0)), "forward_alone_ms has 1 values for 2 lengths"),
            (((4, 8), (1.0, 1.0), (1.0, -1.0)), r"-1\.0 ms at slice_tokens=8"),
            (((4, 8), (1.0, 1.0), (1.0, 1.0), (0.0,) * 4, (0.0,) * 4, 0), "n_sequences=0"),
            (((4, 8), (1.0, 1.0), (1.0, 1.0), (0.0,) * 4, (0.0,) * 4, 1, 0), "seq_tokens=0"),
            (((4, 8), (1.0, 1.0), (1.0, 1.0), (0.0,) * 3), r"forward_context=\(0\.0, 0\.0, 0\.0\).*four finite numbers"),
            (((4, 8), (1.0, 1.0), (1.0, 1.0), (0.0,) * 4, (0.0, 0.0, np.inf, 0.0)), "backward_context=.*four finite numbers"),
            (((4, 8), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0, 0.0, "1")), "forward_context=.*needs numbers"),
            (((4, 8), (1.0, None), (1.0, 1.0)), r"forward_alone_ms=\(1\.0, None\): needs numbers"),
            ((8, (1.0,), (1.0,)), "slice_tokens=8: needs a tuple, list or array"),
            (((4.5, 8), (1.0, 1.0), (1.0, 1.0)), r"slice_tokens=4\.5"),
            (((0, 8), (1.0, 1.0), (1.0, 1.0)), "slice_tokens=0"),
        ],
    )
    def test_coefficients_that_cannot_be_are_refused(self, arguments, said):
        with pytest.raises(CostError, match=said):
            tp.LinearContextCost(*arguments)


class TestHalves:
    """The backward's halves of a fit: measured, or half of the backward each."""

    MEASURED: ClassVar = {"weight_alone_ms": (0.5, 1.0), "input_alone_ms": (0.75, 1.5), "input_context": (0.0, 0.0, 0.25, 0.0)}

    def test_without_measured_weights_each_half_is_half_the_backward(self):
        assert LINEAR.weight_ms(64, 128) == LINEAR.input_ms(64, 128) == LINEAR.backward_ms(64, 128) / 2

    def test_the_weight_half_has_no_context_part_and_the_input_half_is_the_rest(self):
        cost = tp.LinearContextCost((4, 8), (1.0, 2.0), (2.0, 4.0), backward_context=(0, 0, 1, 0), weight_alone_ms=(0.5, 1.0))
        assert cost.weight_ms(6, np.array([0, 8]), 2).tolist() == [1.5, 1.5]
        assert cost.input_ms(6, np.array([0, 8]), 2).tolist() == [4.5, 20.5]

    def test_a_measured_input_half_is_its_own_eq_9(self):
        cost = tp.LinearContextCost((4, 8), (1.0, 2.0), (2.0, 4.0), **self.MEASURED)
        assert cost.input_ms(8, np.array([0, 4])).tolist() == [1.5, 2.5]
        assert cost.backward_ms(8, 4) == 4.0

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"input_alone_ms": (1.0, 1.0)}, "without weight_alone_ms"),
            ({"weight_alone_ms": (3.0, 1.0)}, r"weight_alone_ms=3\.0 is longer than backward_alone_ms=2\.0 at 4 tokens"),
            ({"weight_alone_ms": (1.0,)}, "weight_alone_ms has 1 values for 2 lengths"),
            ({"input_context": (1.0, 0.0, 0.0, 0.0)}, "without input_alone_ms"),
        ],
    )
    def test_halves_that_cannot_be_are_refused(self, changes, said):
        with pytest.raises(CostError, match=said):
            tp.LinearContextCost((4, 8), (1.0, 2.0), (2.0, 4.0), **changes)

    def test_a_fit_recovers_both_halves_and_their_held_out_error_is_0(self):
        truth = replace(
            LINEAR,
            weight_alone_ms=tuple(0.4 * each for each in LINEAR.backward_alone_ms),
            input_alone_ms=tuple(0.7 * each for each in LINEAR.backward_alone_ms),
            input_context=LINEAR.backward_context,
        )
        frame = profile_frame(truth)
        where = [frame[name].to_numpy() for name in ("slice_tokens", "context_tokens", "n_sequences")]
        profile = tp.Profile(frame.assign(input_ms=truth.input_ms(*where), weight_ms=truth.weight_ms(*where)))
        fit = profile.fit()
        for name in ("weight_alone_ms", "input_alone_ms", "input_context"):
            np.testing.assert_allclose(getattr(fit, name), getattr(truth, name), rtol=1e-9, err_msg=name)
        report = profile.report()
        assert report.index.tolist() == ["forward", "backward", "input", "weight"]
        assert (report["median"] < 1e-9).all()
        assert report["n_parameters"].tolist() == [4, 4, 4, 0]
        for cost in (profile.table(), fit):  # 0.7 + 0.4 of the backward: what running it in halves costs is kept
            assert cost.input_ms(32, 64) + cost.weight_ms(32, 64) > cost.backward_ms(32, 64)

    def test_a_table_takes_a_measured_input_half_beside_weights_longer_than_the_backward(self):
        frame = pd.DataFrame(
            {"slice_tokens": [4, 8], "context_tokens": 0, "forward_ms": 1.0, "backward_ms": 2.0, "weight_ms": 2.5}
        )
        with pytest.raises(CostError, match="input_ms too"):
            tp.TableCost(frame)
        assert tp.TableCost(frame.assign(input_ms=0.5)).input_ms(6, 0) == 0.5
        assert tp.TableCost(frame.assign(weight_ms=0.5)).input_ms(6, 0) == 1.5


class TestLink:
    def test_transmission_is_bytes_over_gigabytes_a_second(self):
        assert tp.Link(bandwidth_gb_s=2.0).transmission_ms(3e9) == pytest.approx(1500.0)
        assert tp.Link(latency_ms=5.0).transmission_ms(1e12) == 0.0

    def test_numpys_numbers_are_taken_as_pythons(self):
        link = tp.Link(np.float32(0.5), np.int64(2))
        assert link == tp.Link(0.5, 2)
        assert json.loads(json.dumps(asdict(link))) == asdict(tp.Link(0.5, 2))

    @pytest.mark.parametrize(
        "wrong",
        [
            {"latency_ms": -1.0},
            {"latency_ms": float("inf")},
            {"latency_ms": float("nan")},
            {"bandwidth_gb_s": 0.0},
            {"bandwidth_gb_s": -1.0},
            {"bandwidth_gb_s": float("nan")},
            {"latency_ms": "1"},
            {"latency_ms": True},
            {"bandwidth_gb_s": None},
        ],
    )
    def test_a_link_that_cannot_be_is_refused_with_the_value(self, wrong):
        ((name, value),) = wrong.items()
        with pytest.raises(CostError, match=f"{name}={value!r}"):
            tp.Link(**wrong)


class TestProfile:
    @pytest.mark.parametrize("n_stages", [1, 3])
    def test_fit_recovers_the_coefficients_behind_a_noiseless_profile(self, n_stages):
        fit = tp.Profile(profile_frame(LINEAR, n_stages=n_stages)).fit()
        assert fit.slice_tokens == LINEAR.slice_tokens
        for name in ("forward_alone_ms", "backward_alone_ms", "forward_context", "backward_context"):
            np.testing.assert_allclose(getattr(fit, name), getattr(LINEAR, name), rtol=1e-9, err_msg=name)

    def test_fit_keeps_the_number_of_sequences_it_was_measured_with(self):
        fit = tp.Profile(profile_frame(LINEAR, sequences=(4,))).fit()
        assert fit.n_sequences == 4
        np.testing.assert_allclose(fit.forward_ms(32, 64, 4), LINEAR.forward_ms(32, 64, 4))
        np.testing.assert_allclose(fit.forward_ms(32, 64, 1), LINEAR.forward_ms(32, 64, 1))

    def test_fit_knows_how_far_it_was_measured(self):
        fit = tp.Profile(profile_frame(LINEAR, sequences=(4,))).fit()
        assert fit.seq_tokens == 128 + 256
        contexts = np.array([0, 256, 257])
        np.testing.assert_array_equal(fit.is_extrapolated(128, contexts, 4), [False, False, True])
        assert fit.is_extrapolated(128, contexts, 1).all()

    def test_a_simulation_beyond_the_profile_says_so_and_a_plan_within_it_does_not(self):
        points = [(l, round((128 - l) * share)) for l in (16, 32, 64, 128) for share in (0, 0.5, 1)]
        frame = pd.DataFrame(sorted(set(points)), columns=["slice_tokens", "context_tokens"])
        where = frame["slice_tokens"].to_numpy(), frame["context_tokens"].to_numpy()
        frame = frame.assign(forward_ms=LINEAR.forward_ms(*where), backward_ms=LINEAR.backward_ms(*where))
        fit = tp.Profile(frame.assign(n_sequences=1, stage=0, together=False, repeat=0)).fit()
        plan = tp.optimal_slicing(fit, 128, 2, granularity_tokens=16, min_slice_tokens=16)
        assert not plan.extrapolated
        beyond = ("[(1, [128, 128])]", "[(2, [64, 64])]")
        for slicing, source in [(plan.slicing, "simulated"), *((each, "simulated, extrapolated") for each in beyond)]:
            assert tp.simulate(tp.build_schedule("terapipe", 2, slicing), fit).source == source

    def test_held_out_error_of_a_noiseless_profile_is_0(self):
        errors = tp.Profile(profile_frame(LINEAR)).held_out_error()
        assert errors["kind"].tolist() == ["forward", "backward"]
        assert (errors[["median", "p95"]].to_numpy() < 1e-9).all()
        assert (errors["noise"] == 0).all()

    def test_held_out_error_shows_a_context_part_that_is_not_linear(self):
        bent = tp.CallableCost(lambda l, c, b: 1.0 + l + (c / 16) ** 2, lambda l, c, b: 1.0 + l + c)
        errors = tp.Profile(profile_frame(bent)).held_out_error().set_index("kind")
        assert errors.loc["forward", "median"] > 0.02
        assert errors.loc["backward", "median"] < 1e-9

    def test_held_out_points_are_every_point_behind_a_context_predicted_and_measured(self):
        points = tp.Profile(profile_frame(LINEAR, n_stages=2)).held_out_points()
        assert list(points) == ["kind", "slice_tokens", "context_tokens", "n_sequences", "predicted_ms", "measured_ms", "noise"]
        assert points["kind"].tolist() == ["forward"] * 16 + ["backward"] * 16
        assert not points.duplicated(["kind", "slice_tokens", "context_tokens"]).any()
        assert (points["context_tokens"] > 0).all()
        np.testing.assert_allclose(points["predicted_ms"], points["measured_ms"])

    def test_the_fit_weighs_errors_against_the_whole_time_so_that_short_slices_count(self):
        """A long slice that is 5 % off must not move what is said of short ones, a tenth as expensive."""
        cost = tp.CallableCost(lambda l, c, b: 1.0 + l + l * c / 256 + c / 64, lambda l, c, b: 1.0 + l)
        frame = profile_frame(cost, lengths=(8, 16, 32, 64, 512), contexts=(0, 64, 128, 256, 512))
        off = (frame["slice_tokens"] == 512) & (frame["context_tokens"] == 512)
        fit = tp.Profile(frame.assign(forward_ms=frame["forward_ms"] * np.where(off, 1.05, 1.0))).fit()
        for length, context in ((8, 64), (8, 512), (64, 256), (512, 64)):
            assert fit.forward_ms(length, context) == pytest.approx(cost.forward_ms(length, context), rel=0.03)

    def test_the_report_sets_the_error_of_the_fit_beside_the_noise_of_the_repeats(self):
        frame = profile_frame(LINEAR, n_repeats=4)
        factor = 1 + 0.1 * (frame["repeat"] - 1.5)  # 0.85, 0.95, 1.05, 1.15: quartiles 0.925 and 1.075
        report = tp.Profile(frame.assign(forward_ms=frame["forward_ms"] * factor)).report()
        assert report.index.tolist() == ["forward", "backward"]
        assert (report[["median", "p95"]].to_numpy() < 1e-9).all()
        assert report.loc["forward", ["noise", "noise_p95"]].tolist() == pytest.approx([0.075, 0.075])
        assert report.loc["forward", "median_error"] == pytest.approx(1.2533 * (0.65 / 3) / 1.349 / 2)  # unbiased quartiles
        assert report.loc["backward", ["noise", "noise_p95", "median_error"]].tolist() == [0, 0, 0]
        assert (report["n_repeats"] == 4).all()
        assert (report["n_points"] == 16).all()
        assert (report["n_parameters"] == 4).all()

    def test_one_repeat_says_nothing_about_the_error_of_a_median(self):
        assert np.isinf(tp.Profile(profile_frame(LINEAR, n_repeats=1)).report()["median_error"]).all()

    @pytest.mark.parametrize("n_repeats", [5, 9, 25])
    def test_the_error_of_a_median_is_that_of_normal_samples(self, n_repeats):
        samples = np.random.default_rng(0).normal(1.0, 0.1, size=(800, n_repeats, 2))
        found = np.mean([median_error(sample) for sample in samples])
        assert found == pytest.approx(np.median(samples, axis=1).std(), rel=0.1)

    def test_noise_is_half_the_interquartile_range_of_repeats_over_their_median(self):
        frame = profile_frame(LINEAR, n_repeats=5)
        factor = 1 + 0.1 * (frame["repeat"] - 2)  # 0.8 … 1.2: quartiles 0.9 and 1.1
        noisy = frame.assign(forward_ms=frame["forward_ms"] * factor)
        errors = tp.Profile(noisy).held_out_error().set_index("kind")
        assert errors.loc["forward", "noise"] == pytest.approx(0.1)
        assert errors.loc["backward", "noise"] == 0

    def test_one_outlier_in_three_repeats_does_not_move_the_table(self):
        frame = profile_frame(LINEAR)
        spiked = frame.assign(forward_ms=frame["forward_ms"] * np.where(frame["repeat"] == 1, 50, 1))
        np.testing.assert_allclose(tp.Profile(spiked).table().forward_ms(32, 64), LINEAR.forward_ms(32, 64))

    def test_a_stage_is_fitted_on_its_own_and_stages_together_on_their_mean(self):
        frame = profile_frame(LINEAR, n_stages=2)
        profile = tp.Profile(frame.assign(forward_ms=frame["forward_ms"] * (1 + 2 * frame["stage"])))
        once = LINEAR.forward_ms(64, 128)
        assert profile.n_stages == 2
        assert profile.fit(0).forward_ms(64, 128) == pytest.approx(once)
        assert profile.fit(1).forward_ms(64, 128) == pytest.approx(3 * once)
        assert profile.fit().forward_ms(64, 128) == pytest.approx(2 * once)
        with pytest.raises(CostError, match=r"stage 2 was not measured; measured: \[0, 1\]"):
            profile.fit(2)

    @pytest.mark.parametrize("ratio", [1.0, 1.25, 2.0])
    def test_contention_is_the_time_with_all_ranks_over_the_time_alone(self, ratio):
        profile = tp.Profile(profile_frame(LINEAR, n_stages=2, together=ratio))
        assert profile.contention == pytest.approx(ratio)
        assert profile.contention_raw == pytest.approx(ratio)
        np.testing.assert_allclose(profile.contention_ratios(), ratio)
        np.testing.assert_allclose(profile.table().forward_ms(32, 64), LINEAR.forward_ms(32, 64))  # the table is of ranks alone

    def test_contention_below_1_is_noise_clipped_with_the_raw_ratio_kept(self):
        profile = tp.Profile(profile_frame(LINEAR, together=0.9))
        assert profile.contention == 1.0
        assert profile.contention_raw == pytest.approx(0.9)

    def test_contention_that_was_not_measured_is_refused(self):
        with pytest.raises(CostError, match="contention is unknown"):
            _ = tp.Profile(profile_frame(LINEAR)).contention

    def test_a_profile_comes_back_from_its_file_unchanged(self, tmp_path):
        profile = tp.Profile(profile_frame(LINEAR, n_stages=2, together=1.3), {"machine": "none", "threads": 1})
        path = profile.save(tmp_path / "deep" / "grid.csv")
        loaded = tp.Profile.load(str(path))
        pd.testing.assert_frame_equal(loaded.frame, profile.frame, check_exact=True)
        assert loaded.about == profile.about
        assert json.loads(path.with_suffix(".json").read_text())["machine"] == "none"
        assert loaded.contention == profile.contention
        assert loaded.fit() == profile.fit()

    def test_a_missing_file_or_column_is_refused_by_name(self, tmp_path):
        with pytest.raises(CostError, match=r"nothing\.csv"):
            tp.Profile.load(tmp_path / "nothing.csv")
        with pytest.raises(CostError, match="together"):
            tp.Profile(profile_frame(LINEAR).drop(columns="together"))

    def test_several_numbers_of_sequences_are_a_table_but_no_fit(self):
        profile = tp.Profile(profile_frame(LINEAR, sequences=(1, 2)))
        assert profile.table().forward_ms(32, 64, 2) == pytest.approx(LINEAR.forward_ms(32, 64, 2))
        with pytest.raises(CostError, match=r"n_sequences \[.*1.*2.*\]"):
            profile.fit()

    @pytest.mark.parametrize("contexts", [(16, 64), (0,)], ids=["no t(l, 0)", "no t_ctx"])
    def test_a_fit_to_a_profile_that_measured_only_one_part_is_refused(self, contexts):
        with pytest.raises(CostError, match="context"):
            tp.Profile(profile_frame(LINEAR, contexts=contexts)).fit()
