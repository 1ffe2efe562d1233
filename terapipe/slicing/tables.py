"""What every slice that may be cut costs, packed for the slicing DPs: cost models asked once, for all at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terapipe.cost import CostModel, as_times
from terapipe.errors import SlicingError, check_integer

Cells = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Grid:
    """The slices a sequence can be cut into: n units of `granularity_tokens`, none shorter than `min_slice_tokens`."""

    seq_tokens: int
    granularity_tokens: int = 1
    min_slice_tokens: int = 1

    def __post_init__(self) -> None:
        for name in ("seq_tokens", "granularity_tokens", "min_slice_tokens"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1, SlicingError))
        if self.seq_tokens % self.granularity_tokens:
            near = [each for each in range(1, self.seq_tokens + 1) if self.seq_tokens % each == 0]
            near.sort(key=lambda each: abs(each - self.granularity_tokens))
            raise SlicingError(
                f"granularity_tokens={self.granularity_tokens} does not divide seq_tokens={self.seq_tokens}; "
                f"use a divisor of it, e.g. {near[0]}."
            )
        if self.min_slice_tokens > self.seq_tokens:
            raise SlicingError(
                f"min_slice_tokens={self.min_slice_tokens} is more than seq_tokens={self.seq_tokens}. Use at most that."
            )

    @property
    def n_units(self) -> int:
        """Units of the granularity in the sequence."""
        return self.seq_tokens // self.granularity_tokens

    @property
    def n_cells(self) -> int:
        """Slices that begin and end on the grid."""
        return self.n_units * (self.n_units + 1) // 2

    def cells(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Length and context in tokens of every slice, packed by where it starts."""
        n = self.n_units
        starts = np.repeat(np.arange(n), np.arange(n, 0, -1))
        lengths = np.arange(len(starts)) - (starts * n - starts * (starts - 1) // 2) + 1
        return lengths * self.granularity_tokens, starts * self.granularity_tokens

    def allowed_cells(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Those of `cells` that are long enough."""
        lengths, contexts = self.cells()
        long_enough = lengths >= self.min_slice_tokens
        return lengths[long_enough], contexts[long_enough]

    def lengths(self, ends: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """Slice lengths in tokens from the slices' ends in units."""
        return tuple(int(length) for length in np.diff(ends, prepend=0) * self.granularity_tokens)


def slice_costs(costs: Sequence[CostModel], grid: Grid, n_sequences: Sequence[int]) -> npt.NDArray[np.float64]:
    """Milliseconds of every slice: (len(costs), forward and backward, len(n_sequences), n_cells).

    A slice that is too short, or forbidden in one direction, is infinite in both. A model that
    stands for several stages is asked once.
    """
    lengths, contexts = grid.cells()
    allowed: slice | npt.NDArray[np.bool_] = lengths >= grid.min_slice_tokens if grid.min_slice_tokens > 1 else slice(None)
    lengths, contexts = lengths[allowed], contexts[allowed]  # a measured cost may not know shorter ones
    times = np.full((len(costs), 2, len(n_sequences), grid.n_cells), np.inf)
    for row, cost in enumerate(costs):
        for place, sequences in enumerate(n_sequences):
            for phase, function in enumerate((cost.forward_ms, cost.backward_ms)):
                times[row, phase, place, allowed] = as_times(function(lengths, contexts, sequences), lengths, contexts)
    forbidden = np.isinf(times).any(axis=(0, 1))
    if forbidden.all():
        raise SlicingError(
            f"every slice of seq_tokens={grid.seq_tokens} is forbidden: those of multiples of "
            f"granularity_tokens={grid.granularity_tokens} and at least min_slice_tokens={grid.min_slice_tokens} have an "
            "infinite cost. Allow other lengths, or look where the cost is infinite."
        )
    if forbidden.any():
        times[:, :, forbidden] = np.inf
    return times


def is_extrapolated(costs: Sequence[CostModel], grid: Grid, n_sequences: Sequence[int]) -> bool:
    """Whether any slice to choose among has a cost beyond what was measured: then so has the choice."""
    cells = grid.allowed_cells()
    return any(bool(np.any(cost.is_extrapolated(*cells, sequences))) for cost in costs for sequences in n_sequences)
