"""What a search for slicings is asked: the step, the grid its slices live on, and the cap. Checked sizes only."""

from dataclasses import dataclass

import numpy as np

from terapipe.cost import CostModel, MemoryModel, as_times
from terapipe.errors import CostError, ScheduleError, SlicingError, as_number, check_integer, unknown_name
from terapipe.schedule import FAMILIES
from terapipe.search.replay import Floats, Indices
from terapipe.slicing import MicrobatchSlices, Slicing, SlicingPlan, optimal_slicing
from terapipe.slicing.tables import Grid

MAX_SLICES = 64  # searched unless another number is asked for


@dataclass(frozen=True)
class Problem:
    """A step of `n_microbatches` microbatches of one sequence each, all cut alike; see `search_slicing`."""

    cost: CostModel
    grid: Grid
    n_ranks: int
    n_microbatches: int
    family: str
    n_slices: int | None
    max_slices: int | None
    memory: MemoryModel | None
    memory_cap_bytes: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.cost, CostModel):
            raise CostError(f"cost={self.cost!r}: needs one CostModel, of one stage; the stages are alike.")
        for name in ("n_ranks", "n_microbatches"):
            check_integer(name, getattr(self, name), 1, SlicingError)
        self._check_family()
        self._check_counts()
        self._check_cap()

    def _check_family(self) -> None:
        """Refuse what `search.replay` does not time."""
        if not isinstance(self.family, str) or self.family not in FAMILIES:
            raise ScheduleError(unknown_name("schedule", self.family, FAMILIES))
        family = FAMILIES[self.family]
        remedy = "tp.best_schedule, which simulates every family that trains, or search for 'seq1f1b'"
        if family.kinds == "F":
            why, remedy = "runs forwards alone", "tp.compare_slicings(…, schedule='forward-only'), or search for 'seq1f1b'"
        elif family.kinds != "FB":
            why = "runs the halves of the backward apart"
        elif family.chunks != 1:
            why = f"places {family.chunks} stages on each rank"
        elif family.options:
            why = f"needs the option {', '.join(family.options)}"
        else:
            return
        raise ScheduleError(
            f"schedule={self.family!r}: {self.family} {why}, and a search for slicings times forwards and full backwards "
            f"with one stage a rank. Use {remedy}."
        )

    def _check_counts(self) -> None:
        for name in ("n_slices", "max_slices"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, SlicingError)
        if self.n_slices is not None and self.max_slices is not None:
            raise SlicingError(f"n_slices={self.n_slices} and max_slices={self.max_slices}: give one of them.")
        least = self.n_slices or 1
        if least * self.min_units > self.n_units:
            raise SlicingError(
                f"{least} slices of at least {self.min_units * self.grid.granularity_tokens} tokens do not fit into "
                f"seq_tokens={self.grid.seq_tokens}. Ask for fewer or shorter slices."
            )

    def _check_cap(self) -> None:
        if self.memory is not None and not isinstance(self.memory, MemoryModel):
            raise CostError(f"memory={self.memory!r}: needs a MemoryModel.")
        if self.memory_cap_bytes is None:
            return
        if self.memory is None:
            raise CostError(
                f"memory_cap_bytes={self.memory_cap_bytes!r} without memory=: say what a slice keeps, "
                "e.g. memory=MemoryModel(model, dtype)."
            )
        if not as_number(self.memory_cap_bytes) > 0:
            raise CostError(f"memory_cap_bytes={self.memory_cap_bytes!r}: needs a positive number of bytes.")

    @property
    def n_units(self) -> int:
        """Grid cells of a sequence."""
        return self.grid.n_units

    @property
    def min_units(self) -> int:
        """Grid cells of the shortest slice."""
        return -(-self.grid.min_slice_tokens // self.grid.granularity_tokens)

    @property
    def most_slices(self) -> int:
        """The largest number of slices searched."""
        return self.n_slices or min(self.max_slices or MAX_SLICES, self.n_units // self.min_units)

    def coarser(self, max_units: int) -> int:
        """The finest granularity, in tokens, with at most `max_units` cells; slices on it are on the finer grid too."""
        cells = next(n for n in range(min(max_units, self.n_units), 0, -1) if self.n_units % n == 0)
        return self.grid.seq_tokens // cells

    def plan(self, n_stages: int, granularity_tokens: int, max_slices: int | None) -> SlicingPlan:
        """The slicing DP's answer for one microbatch; `SlicingError` where every slicing is forbidden."""
        return optimal_slicing(
            self.cost,
            self.grid.seq_tokens,
            n_stages,
            granularity_tokens=granularity_tokens,
            max_slices=max_slices,
            min_slice_tokens=self.grid.min_slice_tokens,
        )

    def times_ms(self, lengths: Indices) -> tuple[Floats, Floats]:
        """Forward and backward of slicings in tokens, one a row."""
        contexts = lengths.cumsum(axis=1) - lengths
        forward = as_times(self.cost.forward_ms(lengths, contexts, 1), lengths, contexts)
        return forward, as_times(self.cost.backward_ms(lengths, contexts, 1), lengths, contexts)

    def step_ms(self, lengths: Indices, context: int) -> Floats:
        """Forward plus backward of slices that begin at one place."""
        contexts = np.full_like(lengths, context)
        forward = as_times(self.cost.forward_ms(lengths, contexts, 1), lengths, contexts)
        total: Floats = forward + as_times(self.cost.backward_ms(lengths, contexts, 1), lengths, contexts)
        return total

    def slicing(self, lengths: Indices) -> Slicing:
        """The step's slicing of one row of lengths."""
        return Slicing((MicrobatchSlices(1, tuple(int(length) for length in lengths)),) * self.n_microbatches)
