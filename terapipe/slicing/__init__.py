"""How sequences are cut into slices: the value, its notation, and the slicing DPs."""

from terapipe.slicing.curve import t_max_curve
from terapipe.slicing.flops import equal_flops_slicing
from terapipe.slicing.latency import Objective, pipeline_latency_ms
from terapipe.slicing.optimal import SlicingPlan, optimal_slicing
from terapipe.slicing.value import MicrobatchSlices, Slicing, uniform_slicing

__all__ = [
    "MicrobatchSlices",
    "Objective",
    "Slicing",
    "SlicingPlan",
    "equal_flops_slicing",
    "optimal_slicing",
    "pipeline_latency_ms",
    "t_max_curve",
    "uniform_slicing",
]
