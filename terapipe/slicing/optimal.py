"""The slicing DP: the slicing of one sequence with the least pipeline latency, proven optimal.

TeraPipe (ICML 2021) minimises eq. (5), T = Σ tᵢ + (K−1)·max tⱼ, by solving eq. (7, 8) for one t_max
after another. Here no t_max is skipped: S*(L; t_max) never rises as t_max rises, so that among all
t_max in [low, high] the latency is at least S*(high) + (K−1)·low. Branch and bound over intervals
of t_max proves the optimum in tens of DPs. For the "two-phase" objective an interval becomes a box
of (longest forward, longest backward).
"""

import heapq
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from terapipe.cost import CostModel, as_times
from terapipe.errors import SlicingError, check_integer, unknown_name
from terapipe.slicing.value import MicrobatchSlices, Slicing

Objective = Literal["two-phase", "paper"]
ROUNDING = 1e-12  # relative: sums of the same slices in another order differ by less
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SlicingPlan:
    """What `optimal_slicing` found.

    Attributes
    ----------
    slicing : Slicing
        One microbatch of one sequence.
    latency_ms, lower_bound_ms : float
        Its pipeline latency by `objective`, and the proven bound no slicing goes below.
    t_max_ms : float
        What the (K−1) of the objective multiplies: the slowest slice ("paper"), or the slowest
        forward plus the slowest backward ("two-phase").
    n_programs : int
        Dynamic programs solved.
    """

    slicing: Slicing
    latency_ms: float
    lower_bound_ms: float
    t_max_ms: float
    n_programs: int
    objective: Objective
    n_stages: int


def pipeline_latency_ms(slicing: Slicing, cost: CostModel, n_stages: int, objective: Objective = "two-phase") -> float:
    """Latency of a step on `n_stages` equal stages, all forwards before all backwards, messages free.

    "paper": eq. (5), Σ t + (K−1)·max t with t = forward + backward. "two-phase": Σ(f+b) +
    (K−1)·(max f + max b), what such a pipeline really takes.
    """
    _check_objective(objective)
    check_integer("n_stages", n_stages, 1, SlicingError)
    _, _, lengths, contexts, sequences = slicing.units.T
    forward = as_times(cost.forward_ms(lengths, contexts, sequences), lengths)
    backward = as_times(cost.backward_ms(lengths, contexts, sequences), lengths)
    slowest = (forward + backward).max() if objective == "paper" else forward.max() + backward.max()
    waiting = (n_stages - 1) * slowest if n_stages > 1 else 0.0  # 0 × a forbidden slice is not 0
    return float((forward + backward).sum() + waiting)


def optimal_slicing(
    cost: CostModel,
    seq_tokens: int,
    n_stages: int,
    *,
    granularity_tokens: int = 1,
    objective: Objective = "two-phase",
    min_slice_tokens: int = 1,
) -> SlicingPlan:
    """Cut one sequence into the slices with the least pipeline latency on `n_stages` equal stages.

    Exact for any cost: neither forward nor backward need rise with slice or context length, and an
    infinite cost forbids a slice. Each DP is O((L/granularity)²) in time and memory.

    Parameters
    ----------
    cost : CostModel
        Of one stage.
    seq_tokens, n_stages : int
        L and K of the paper.
    granularity_tokens : int
        Slice lengths are multiples of it; it must divide `seq_tokens`.
    objective : "two-phase" or "paper"
        See `pipeline_latency_ms`.
    min_slice_tokens : int
        No slice is shorter.

    Raises
    ------
    SlicingError
        For sizes that do not fit, or where every slicing is forbidden.
    """
    _check_objective(objective)
    check_integer("n_stages", n_stages, 1, SlicingError)
    forward, backward = _slice_costs(cost, seq_tokens, granularity_tokens, min_slice_tokens)
    if objective == "paper":
        forward, backward = forward + backward, np.where(np.isinf(backward), np.inf, 0.0)
    search = _BranchAndBound(forward, backward, n_stages)
    latency, ends = search.run()
    lengths = tuple(int(length) for length in np.diff([0, *ends]) * granularity_tokens)
    return SlicingPlan(
        slicing=Slicing((MicrobatchSlices(1, lengths),)),
        latency_ms=latency,
        lower_bound_ms=latency,
        t_max_ms=search.slowest,
        n_programs=search.n_programs,
        objective=objective,
        n_stages=n_stages,
    )


def _check_objective(objective: str) -> None:
    if objective not in get_args(Objective):
        raise SlicingError(unknown_name("objective", objective, get_args(Objective)))


def _slice_costs(cost: CostModel, seq_tokens: int, granularity: int, min_slice_tokens: int) -> tuple[Matrix, Matrix]:
    """Forward and backward ms of the slice from `start` to `end`, at [end, start] in units of granularity; inf elsewhere."""
    for name, value in (
        ("seq_tokens", seq_tokens),
        ("granularity_tokens", granularity),
        ("min_slice_tokens", min_slice_tokens),
    ):
        check_integer(name, value, 1, SlicingError)
    if seq_tokens % granularity:
        raise SlicingError(f"granularity_tokens={granularity} does not divide seq_tokens={seq_tokens}; use a divisor of it.")
    if min_slice_tokens > seq_tokens:
        raise SlicingError(f"min_slice_tokens={min_slice_tokens} is more than seq_tokens={seq_tokens}.")
    n = seq_tokens // granularity
    ends, starts = np.tril_indices(n + 1, k=-1)
    lengths, contexts = (ends - starts) * granularity, starts * granularity
    long_enough = lengths >= min_slice_tokens
    ends, starts, lengths, contexts = ends[long_enough], starts[long_enough], lengths[long_enough], contexts[long_enough]
    forward, backward = np.full((n + 1, n + 1), np.inf), np.full((n + 1, n + 1), np.inf)
    forward[ends, starts] = as_times(cost.forward_ms(lengths, contexts, 1), lengths, contexts)
    backward[ends, starts] = as_times(cost.backward_ms(lengths, contexts, 1), lengths, contexts)
    return forward, backward


@dataclass(order=True)
class _Box:
    """Slicings whose slowest forward is in [f_low, f_high] and slowest backward in [b_low, b_high].

    `total` is the least Σ(f+b) under the upper corner, `f_max` and `b_max` are its slowest slices.
    """

    bound: float
    f_low: float
    f_high: float
    b_low: float
    b_high: float
    total: float
    f_max: float
    b_max: float


class _BranchAndBound:
    """Best slicing over all (slowest forward, slowest backward), exact."""

    def __init__(self, forward: Matrix, backward: Matrix, n_stages: int) -> None:
        self.forward, self.backward, self.total = forward, backward, forward + backward
        self.extra_stages = n_stages - 1
        self.best, self.ends, self.slowest = np.inf, [0], 0.0
        self.n_programs = 0

    def run(self) -> tuple[float, list[int]]:
        finite = np.isfinite(self.total)
        if not finite.any():
            raise SlicingError("every slice is forbidden: its cost is infinite, or it is shorter than min_slice_tokens.")
        boxes = [self._solve(0.0, float(self.forward[finite].max()), 0.0, float(self.backward[finite].max()))]
        while boxes and self._is_open(boxes[0]):
            for part in self._split(heapq.heappop(boxes)):
                if self._is_open(part):
                    heapq.heappush(boxes, part)
        if not np.isfinite(self.best):
            raise SlicingError(
                "no slicing covers the sequence: too many slices are forbidden (infinite cost, min_slice_tokens)."
            )
        return float(self.best), self.ends

    def _is_open(self, box: _Box) -> bool:
        """Whether the box can hold something better, beyond the rounding of its sums."""
        return box.bound < self.best * (1 - ROUNDING)

    def _solve(self, f_low: float, f_high: float, b_low: float, b_high: float) -> _Box:
        """The box with its DP solved; the slicing found competes for the best."""
        ends, total = self._program(f_high, b_high)
        if not ends:
            return _Box(np.inf, f_low, f_high, b_low, b_high, np.inf, f_high, b_high)
        starts = [0, *ends[:-1]]
        f_max, b_max = float(self.forward[ends, starts].max()), float(self.backward[ends, starts].max())
        latency = total + self.extra_stages * (f_max + b_max)
        if latency < self.best:
            self.best, self.ends, self.slowest = latency, ends, f_max + b_max
        return _Box(total + self.extra_stages * (f_low + b_low), f_low, f_high, b_low, b_high, total, f_max, b_max)

    def _split(self, box: _Box) -> list[_Box]:
        """Halve the longer side of what is open: below (f_max, b_max).

        A slicing at or above (f_max, b_max) is no better than the one found: its sum is no smaller
        and neither are its maxima. The upper half keeps the box's DP, only the lower needs its own.
        """
        f_gap, b_gap = box.f_max - box.f_low, box.b_max - box.b_low
        if max(f_gap, b_gap) <= 0:
            return []
        if f_gap >= b_gap:
            cut, below = _cut(box.f_low, box.f_max)
            lower = self._solve(box.f_low, below, box.b_low, box.b_high)
            upper = replace(box, bound=box.total + self.extra_stages * (cut + box.b_low), f_low=cut)
        else:
            cut, below = _cut(box.b_low, box.b_max)
            lower = self._solve(box.f_low, box.f_high, box.b_low, below)
            upper = replace(box, bound=box.total + self.extra_stages * (box.f_low + cut), b_low=cut)
        return [lower, upper]

    def _program(self, f_high: float, b_high: float) -> tuple[list[int], float]:
        """Eq. (7, 8): least Σ(f+b) with every forward ≤ f_high and backward ≤ b_high, and the slices' ends."""
        self.n_programs += 1
        allowed = np.where((self.forward <= f_high) & (self.backward <= b_high), self.total, np.inf)
        n = len(allowed) - 1
        least, came_from = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
        least[0] = 0.0
        for end in range(1, n + 1):
            sums = least[:end] + allowed[end, :end]
            came_from[end] = sums.argmin()
            least[end] = sums[came_from[end]]
        if not np.isfinite(least[n]):
            return [], np.inf
        ends = [n]
        while came_from[ends[0]] > 0:
            ends.insert(0, int(came_from[ends[0]]))
        return ends, float(least[n])


def _cut(low: float, high: float) -> tuple[float, float]:
    """The middle of [low, high] and the next number below it; `high` itself once they nearly touch."""
    middle = (low + high) / 2
    cut = middle if middle - low > 1e-5 * high else high
    return cut, float(np.nextafter(cut, -np.inf))
