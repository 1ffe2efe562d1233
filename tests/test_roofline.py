"""A slice's least times equal the closed forms of computing, moving and launching, and never fall as work grows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

import terapipe as tp
from terapipe.errors import CostError
from terapipe.schedule import build_schedule

SOURCES = dict.fromkeys(("peak_tflops", "memory_gb_s", "launch_us", "op_gb_s", "op_latency_us", "memory_gb"), "invented")
MODEL = tp.ModelConfig(n_layers=4, d_model=512, n_heads=8, max_seq_tokens=4096)
SIZES = st.tuples(st.integers(1, 2048), st.integers(0, 2048), st.integers(1, 8))


def device(**values) -> tp.Device:
    """One on which nothing takes time but what is asked for."""
    free = {"peak_tflops": {2: 1e30}, "memory_gb_s": 1e30, "launch_us": 0, "op_gb_s": 1e30, "op_latency_us": 0, "memory_gb": 1}
    return tp.Device("invented", **(free | {"source": SOURCES} | values))


COMPUTE_BOUND, MEMORY_BOUND, LAUNCH_BOUND = device(peak_tflops={2: 1.0}), device(memory_gb_s=1.0), device(launch_us=7.0)
PRESETS = ["V100 16GB", "A100 80GB", "H100", "H200"]


class TestClosedForms:
    @given(SIZES)
    @PROPERTY
    def test_compute_bound_a_layers_forward_is_24_l_h2_plus_4_h_l_times_c_plus_half_l(self, sizes):
        l, c, b = sizes
        h = MODEL.d_model
        flops = b * (24 * l * h**2 + 4 * h * l * (c + l / 2))
        cost = tp.RooflineCost(MODEL, COMPUTE_BOUND, n_layers=3)
        assert cost.forward_flops(l, c, b) == pytest.approx(3 * flops, rel=1e-12)
        assert cost.forward_ms(l, c, b) == pytest.approx(3 * flops / 1e9, rel=1e-12)

    @given(SIZES)
    @PROPERTY
    def test_compute_bound_a_backward_is_twice_the_products_and_two_and_a_half_times_the_attention(self, sizes):
        l, c, b = sizes
        h = MODEL.d_model
        products, attention = 24 * b * l * h**2, 4 * h * b * l * (c + l / 2)
        cost = tp.RooflineCost(MODEL, COMPUTE_BOUND)
        assert cost.backward_ms(l, c, b) == pytest.approx((2 * products + 2.5 * attention) / 1e9, rel=1e-12)
        assert cost.weight_ms(l, c, b) == pytest.approx(products / 1e9, rel=1e-12)
        assert cost.input_ms(l, c, b) == pytest.approx((products + 2.5 * attention) / 1e9, rel=1e-9)

    def test_memory_bound_a_layer_moves_its_12_h2_weights_its_activations_and_the_prefix(self):
        l, c, b, h = 64, 192, 2, MODEL.d_model
        weights = 12 * h**2
        products = b * l * h * ((1 + 3) + (1 + 1) + (1 + 4) + (4 + 1))
        attention = 2 * b * l * h + 2 * b * (c + l) * h
        elementwise = b * l * h * (2 * 2 + 2 * 3 + 2 * 4)
        expected = 2 * (weights + products + attention + elementwise) / 1e6  # 2 bytes a number, 1 GB/s
        assert tp.RooflineCost(MODEL, MEMORY_BOUND).forward_ms(l, c, b) == pytest.approx(expected, rel=1e-12)

    def test_memory_bound_a_weight_gradient_moves_what_its_forward_moved(self):
        l, b, h = 64, 2, MODEL.d_model
        expected = 2 * (12 * h**2 + b * l * h * 16) / 1e6
        assert tp.RooflineCost(MODEL, MEMORY_BOUND).weight_ms(l, 100, b) == pytest.approx(expected, rel=1e-12)

    def test_launch_bound_every_kernel_takes_the_floor(self):
        cost = tp.RooflineCost(MODEL, LAUNCH_BOUND, n_layers=2)
        n_forward, n_weight = len(cost.forward_kernels), len(cost.weight_kernels)
        assert (n_forward, n_weight) == (10, 4)  # 4 products, attention, 2 norms, 2 residuals, activation
        np.testing.assert_allclose(cost.forward_ms(np.array([1, 4096]), 0), 2 * n_forward * 0.007)
        assert cost.backward_ms(1, 0) == pytest.approx(2 * (n_forward + n_weight) * 0.007)

    def test_swiglu_grouped_queries_and_rotation_are_counted(self):
        llama = tp.ModelConfig(4, 512, 8, n_kv_heads=2, d_ff=1024, activation="swiglu", position="rotary", norm="rmsnorm")
        l, c, h = 32, 64, 512
        flops = 2 * l * (h * (h + 2 * 128) + h * h + h * 2 * 1024 + 1024 * h) + 4 * h * l * (c + l / 2)
        assert tp.RooflineCost(llama, COMPUTE_BOUND).forward_ms(l, c) == pytest.approx(flops / 1e9, rel=1e-12)
        assert len(tp.RooflineCost(llama, COMPUTE_BOUND).forward_kernels) == 11

    def test_efficiency_scales_the_peak_alone(self):
        half = tp.RooflineCost(MODEL, COMPUTE_BOUND, efficiency=0.5)
        assert half.forward_ms(64, 64) == pytest.approx(2 * tp.RooflineCost(MODEL, COMPUTE_BOUND).forward_ms(64, 64))
        moved = [tp.RooflineCost(MODEL, MEMORY_BOUND, efficiency=share).forward_ms(64, 64) for share in (0.5, 1.0)]
        assert moved[0] == moved[1]

    def test_numbers_of_4_bytes_take_their_own_peak_and_twice_the_traffic(self):
        both = device(peak_tflops={2: 8.0, 4: 2.0})
        assert tp.RooflineCost(MODEL, both, dtype_bytes=4).forward_ms(64, 0) == pytest.approx(
            4 * tp.RooflineCost(MODEL, both).forward_ms(64, 0)
        )
        slow = device(peak_tflops={2: 1e30, 4: 1e30}, memory_gb_s=1.0)
        assert tp.RooflineCost(MODEL, slow, dtype_bytes=4).forward_ms(64, 0) == pytest.approx(
            2 * tp.RooflineCost(MODEL, slow).forward_ms(64, 0)
        )


class TestOpRanks:
    def test_compute_is_divided_by_the_op_ranks(self):
        one, four = (tp.RooflineCost(MODEL, COMPUTE_BOUND, op_ranks=n) for n in (1, 4))
        for kind in ("forward_ms", "backward_ms", "weight_ms"):
            assert getattr(four, kind)(100, 50, 2) == pytest.approx(getattr(one, kind)(100, 50, 2) / 4, rel=1e-12)

    @pytest.mark.parametrize("n", [2, 8])
    def test_two_ring_all_reduces_a_layer_and_direction_are_added(self, n):
        talking = device(op_gb_s=3.0, op_latency_us=11.0)
        l, b = 100, 2
        ring = 2 * (n - 1) / n * (b * l * MODEL.d_model * 2) / 3e6 + 0.011
        cost = tp.RooflineCost(MODEL, talking, n_layers=3, op_ranks=n)
        assert cost.forward_ms(l, 50, b) == pytest.approx(3 * 2 * ring, rel=1e-9)
        assert cost.input_ms(l, 50, b) == pytest.approx(3 * 2 * ring, rel=1e-9)
        assert cost.weight_ms(l, 50, b) == pytest.approx(0.0, abs=1e-12)

    def test_one_rank_reduces_nothing(self):
        assert tp.RooflineCost(MODEL, device(op_latency_us=11.0)).step_ms(100, 0) == pytest.approx(0.0, abs=1e-12)

    @pytest.mark.parametrize(
        ("model", "n", "said"),
        [
            (MODEL, 3, "op_ranks=3 does not divide n_heads=8"),
            (tp.ModelConfig(4, 512, 8, n_kv_heads=2), 4, "op_ranks=4 does not divide n_kv_heads=2"),
            (tp.ModelConfig(4, 512, 8, d_ff=1001), 2, "op_ranks=2 does not divide d_ff=1001"),
        ],
    )
    def test_what_op_ranks_cannot_share_is_refused(self, model, n, said):
        with pytest.raises(CostError, match=said):
            tp.RooflineCost(model, "H100", op_ranks=n)


class TestCost:
    @given(SIZES, st.sampled_from(PRESETS), st.sampled_from([1, 2]))
    @PROPERTY
    def test_longer_slices_contexts_and_batches_never_cost_less(self, sizes, name, op_ranks):
        cost = tp.RooflineCost(MODEL, name, op_ranks=op_ranks)
        for kind in ("forward_ms", "backward_ms", "weight_ms", "input_ms"):
            here = getattr(cost, kind)(*sizes)
            for axis in range(3):
                more = [size + (axis == index) for index, size in enumerate(sizes)]
                assert getattr(cost, kind)(*more) >= here * (1 - 1e-12) > 0

    def test_numbers_and_arrays_broadcast(self):
        cost = tp.RooflineCost(MODEL, "A100 80GB")
        assert np.shape(cost.forward_ms(16, 16)) == ()
        both = cost.backward_ms(np.array([[16], [100]]), np.array([0, 50, 100]), 2)
        assert both.shape == (2, 3)
        assert both[1, 2] == cost.backward_ms(100, 100, 2)
        assert not cost.is_extrapolated(16, 16)

    def test_it_plans_a_slicing(self):
        plan = tp.optimal_slicing(tp.RooflineCost(MODEL, "V100 16GB"), 512, 4, granularity_tokens=64)
        assert plan.slicing.seq_tokens == 512

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"n_layers": 0}, "n_layers=0"),
            ({"op_ranks": 0}, "op_ranks=0"),
            ({"n_layers": 1.5}, r"n_layers=1\.5"),
            ({"efficiency": 0}, "efficiency=0"),
            ({"efficiency": 1.01}, r"efficiency=1\.01"),
            ({"efficiency": "half"}, "efficiency='half'"),
            ({"efficiency": True}, "efficiency=True"),
            ({"efficiency": np.float64("nan")}, r"efficiency=np\.float64\(nan\)"),
            ({"device": "H10"}, r"unknown device 'H10'\. Did you mean 'H100'"),
            ({"dtype_bytes": 8}, r"dtype_bytes=8.*2, 4 bytes"),
            ({"model": "gpt3-1b"}, "model='gpt3-1b'"),
        ],
    )
    def test_what_cannot_be_is_refused_with_the_value(self, values, said):
        with pytest.raises(CostError, match=said):
            tp.RooflineCost(**{"model": MODEL, "device": "H100"} | values)


class TestDevice:
    @pytest.mark.parametrize("name", PRESETS)
    def test_a_preset_states_the_source_of_every_figure(self, name):
        preset = tp.Device.preset(name)
        assert set(preset.source) == set(SOURCES)
        assert all("datasheet" in text or "assumed" in text for text in preset.source.values())
        assert preset.name == name
        assert {2, 4} <= set(preset.peak_tflops)

    def test_names_are_found_in_any_case_and_spacing(self):
        assert tp.Device.preset(" v100  16gb") == tp.Device.preset("V100 16GB")

    def test_published_figures(self):  # the datasheets
        found = {name: tp.Device.preset(name) for name in PRESETS}
        assert [found[name].peak_flops(2) / 1e12 for name in PRESETS] == [125, 312, 989, 989]
        assert [found[name].memory_gb_s for name in PRESETS] == [900, 2039, 3350, 4800]
        assert [found[name].op_gb_s for name in PRESETS] == [150, 300, 450, 450]

    @pytest.mark.timeout(60)
    def test_this_machine_is_measured_once_and_says_so(self):
        here = tp.Device.preset("This Machine")
        assert tp.Device.preset("this machine") is here
        assert here.peak_flops(4) > 1e8
        assert here.memory_gb_s > 0.1
        assert 0 < here.launch_us < 1e4
        for figure in ("peak_tflops", "memory_gb_s", "launch_us"):
            assert here.source[figure].startswith("measured here: numpy, one thread")
        assert tp.RooflineCost(MODEL, "this machine").dtype_bytes == 4

    def test_numpys_numbers_are_taken_as_pythons(self):
        figures = {"memory_gb_s": 900, "launch_us": 2.5, "op_gb_s": 150.0, "op_latency_us": 0, "memory_gb": 16}
        plain = device(peak_tflops={2: 125.0}, **figures)
        assert plain == device(peak_tflops={2: np.float32(125)}, **{name: np.float32(each) for name, each in figures.items()})
        assert tp.RooflineCost(MODEL, plain, efficiency=np.float32(0.5)) == tp.RooflineCost(MODEL, plain, efficiency=0.5)
        for number in (np.int64(3), np.float32(3)):
            cost = tp.TransferCost(tp.RooflineCost(MODEL, plain), tp.Link(0.0, 1.0), number)
            assert type(cost.bytes_per_token) is float
            assert cost.bytes_per_token == 3

    def test_a_machine_that_cannot_be_measured_says_why(self, monkeypatch):
        from terapipe.cost import device as module

        monkeypatch.setattr(module, "_MEASUREMENT", "raise SystemExit('no numpy today')")
        with pytest.raises(CostError, match=r"could not be measured: no numpy today"):
            module._this_machine.__wrapped__()

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"peak_tflops": {}}, "peak_tflops={}"),
            ({"peak_tflops": {2: 0}}, r"peak_tflops\[2\]=0"),
            ({"memory_gb_s": 0}, "memory_gb_s=0"),
            ({"launch_us": -1}, "launch_us=-1"),
            ({"op_gb_s": float("nan")}, "op_gb_s=nan"),
            ({"op_gb_s": True}, "op_gb_s=True"),
            ({"memory_gb": "80"}, "memory_gb='80'"),
            ({"source": {"launch_us": "guessed"}}, "no source for.*peak_tflops"),
        ],
    )
    def test_a_device_that_cannot_be_is_refused(self, values, said):
        with pytest.raises(CostError, match=said):
            device(**values)


class TestTransferCost:
    LINK = tp.Link(latency_ms=0.25, bandwidth_gb_s=0.001, overlap=False)
    COST = tp.CallableCost(lambda l, c, b: b * (1 + l + c / 8), lambda l, c, b: b * (2 * l + c / 4), lambda l, c, b: b * l)

    def test_each_phase_gets_one_message_and_the_weight_half_none(self):
        cost = tp.TransferCost(self.COST, self.LINK, 3.0)
        message = 0.25 + 2 * 10 * 3 / 1e3
        assert cost.forward_ms(10, 8, 2) == pytest.approx(self.COST.forward_ms(10, 8, 2) + message)
        assert cost.backward_ms(10, 8, 2) == pytest.approx(self.COST.backward_ms(10, 8, 2) + message)
        assert cost.weight_ms(10, 8, 2) == self.COST.weight_ms(10, 8, 2)
        assert cost.input_ms(10, 8, 2) == pytest.approx(self.COST.input_ms(10, 8, 2) + message)
        assert np.shape(cost.forward_ms(np.array([[1], [2]]), np.arange(3))) == (2, 3)

    def test_it_knows_what_its_cost_extrapolates(self):
        import pandas as pd

        frame = pd.DataFrame(
            {"slice_tokens": [8, 16, 8, 16], "context_tokens": [0, 0, 8, 8], "forward_ms": 1.0, "backward_ms": 1.0}
        )
        cost = tp.TransferCost(tp.TableCost(frame, extrapolate=True), self.LINK, 1.0)
        np.testing.assert_array_equal(cost.is_extrapolated(np.array([8, 20]), 0), [False, True])

    @pytest.mark.parametrize("n_stages", [2, 3, 5])
    @pytest.mark.parametrize("n_slices", [1, 2, 6])
    def test_with_equal_slices_the_simulated_step_is_one_message_a_phase_shorter(self, n_stages, n_slices):
        """Every stage is charged, but the last sends no forward and the first no backward."""
        even = tp.CallableCost(lambda l, c, b: 1.5 * l, lambda l, c, b: 2.5 * l)
        slicing = tp.uniform_slicing(4 * n_slices, n_slices)
        simulated = tp.simulate(build_schedule("terapipe", n_stages, slicing), even, self.LINK, 500.0)
        planned = tp.pipeline_latency_ms(slicing, tp.TransferCost(even, self.LINK, 500.0), n_stages)
        message = 0.25 + 4 * 500 / 1e3
        assert simulated.makespan_ms == pytest.approx(planned - 2 * message, rel=1e-12)

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(2, 5))
    @PROPERTY
    def test_for_any_slices_the_simulated_step_is_shorter_by_at_most_one_stage(self, lengths, n_stages):
        slicing = tp.Slicing.parse(f"[(1, {lengths})]")
        simulated = tp.simulate(build_schedule("terapipe", n_stages, slicing), self.COST, self.LINK, 500.0).makespan_ms
        cost = tp.TransferCost(self.COST, self.LINK, 500.0)
        assert simulated <= tp.pipeline_latency_ms(slicing, cost, n_stages) * (1 + 1e-12)
        assert simulated >= tp.pipeline_latency_ms(slicing, cost, n_stages - 1) * (1 - 1e-12)

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
    @PROPERTY
    def test_it_is_the_simulator_with_busy_links_where_each_stage_pays_what_it_sends(self, lengths, n_stages):
        slicing = tp.Slicing.parse(f"[(1, {lengths})]")
        sends = tp.TransferCost(self.COST, self.LINK, 500.0)
        costs = [
            tp.CallableCost(
                (sends if stage < n_stages - 1 else self.COST).forward_ms, (sends if stage > 0 else self.COST).backward_ms
            )
            for stage in range(n_stages)
        ]
        schedule = build_schedule("terapipe", n_stages, slicing)
        simulated = tp.simulate(schedule, self.COST, self.LINK, 500.0)
        assert simulated.makespan_ms == pytest.approx(tp.simulate(schedule, costs).makespan_ms, rel=1e-12)

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"cost": 3.0}, r"cost=3\.0"),
            ({"link": 0.5}, r"link=0\.5"),
            ({"bytes_per_token": -1}, "bytes_per_token=-1"),
            ({"bytes_per_token": float("inf")}, "bytes_per_token=inf"),
            ({"bytes_per_token": float("nan")}, "bytes_per_token=nan"),
            ({"bytes_per_token": False}, "bytes_per_token=False"),
        ],
    )
    def test_what_cannot_be_is_refused_with_the_value(self, values, said):
        with pytest.raises(CostError, match=said):
            tp.TransferCost(**{"cost": self.COST, "link": self.LINK, "bytes_per_token": 1.0} | values)
