"""The timings table that both back ends emit, one row an executed action, and what it tells.

Simulated and measured timelines have the same columns; `source` says which one a table is. Times
are milliseconds from the step's start; steps below 0 are warm-up and count in no metric.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.errors import TimelineError
from terapipe.timeline.budget import find_budget
from terapipe.timeline.compute import Costs
from terapipe.timeline.memory import count_held, count_units, find_peak_bytes
from terapipe.timeline.path import find_path
from terapipe.timeline.sources import SIMULATED, SIMULATED_EXTRAPOLATED
from terapipe.timeline.table import check_table, fill_in

Table = pd.DataFrame | Callable[[], pd.DataFrame]


class Timeline:
    """When every action ran.

    Parameters
    ----------
    frame : DataFrame, or a function that makes it
        The table below; a function is called when the table is first looked at.
    memory : the same, optional
        What each rank holds; by default units are counted, and bytes stay unknown.
    alone_ms : array, optional
        What each row's action takes on a machine to itself, where that is known: in a simulation.
    cost : CostModel or list of CostModel, optional
        What the slices were simulated with; of one stage, or one for each.

    Attributes
    ----------
    frame : DataFrame
        source ("simulated" or "emulated", either with ", extrapolated", "measured", "given", or "replayed",
        with ", simulated" and so on after it where durations are not measured; ", link given" last where
        the messages of a run waited for the link of its spec), step,
        rank, stage, kind, microbatch, slice, n_sequences, slice_tokens, context_tokens, start_ms,
        end_ms, ready_ms (when the last input was there; measured: no later than), blocked_by (text
        of the action that it waited for last), n_bytes (message sent on).
    memory : DataFrame
        What a rank holds once an action has ended (`timeline.memory`): step, rank, time_ms, units,
        activation_bytes, context_bytes (keys, values, their gradients, dropout masks), queue_bytes
        (what weight gradients wait for), weight_bytes (parameters), total_bytes.

    Raises
    ------
    TimelineError
        For a table without rows or a needed column, an unknown kind, an action that ends before it starts.
    """

    def __init__(
        self,
        frame: Table,
        memory: Table | None = None,
        alone_ms: npt.NDArray[np.float64] | None = None,
        cost: Costs | None = None,
    ) -> None:
        if callable(frame):
            self._make_frame = frame
        else:
            self.frame = check_table(frame)
        self._memory = memory
        self.alone_ms, self.cost = alone_ms, cost

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The table; see the class."""
        return self._make_frame()

    @cached_property
    def memory(self) -> pd.DataFrame:
        """What each rank holds over time; see the class."""
        if self._memory is None:
            return count_units(self.frame)
        return self._memory() if callable(self._memory) else self._memory

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> "Timeline":
        """A timeline from any table of rank, kind, microbatch, slice, start_ms, end_ms.

        Missing columns are filled in: one step, stage = rank, unknown tokens, no bytes; blocked_by from
        the times, where no action is in a step twice.

        Raises
        ------
        TimelineError
            Where a needed column is missing, a kind is unknown, or an action ends before it starts.
        """
        return cls(fill_in(frame))

    @property
    def source(self) -> str:
        """Where the times come from; "mixed" where from several places."""
        found = self.frame["source"].unique()
        return str(found[0]) if len(found) == 1 else "mixed"

    @property
    def is_simulated(self) -> bool:
        """Whether every time is simulated, of slices whose costs are extrapolated too."""
        return set(self.frame["source"]) <= {SIMULATED, SIMULATED_EXTRAPOLATED}

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return int(self.frame["rank"].nunique())

    @cached_property
    def measured(self) -> pd.DataFrame:
        """The rows that count: warm-up steps left out, unless there is nothing else."""
        counted = self.frame[self.frame["step"] >= 0]
        return self.frame if counted.empty else counted

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a measured step: makespan_ms, busy_ms (of all ranks), n_tokens; index = step."""
        rows = self.measured
        groups = rows.groupby("step")
        table = pd.DataFrame(
            {
                "makespan_ms": groups["end_ms"].max() - groups["start_ms"].min(),
                "busy_ms": (rows["end_ms"] - rows["start_ms"]).groupby(rows["step"]).sum(),
            }
        )
        first = rows[(rows["stage"] == rows["stage"].min()) & (rows["kind"] == "F")]
        tokens = (first["slice_tokens"] * first["n_sequences"]).groupby(first["step"]).sum(min_count=1)
        return table.assign(n_tokens=tokens.reindex(table.index))

    @property
    def makespan_ms(self) -> float:
        """First action's start to last action's end; the median over measured steps."""
        return float(self.steps["makespan_ms"].median())

    @property
    def bubble_fraction(self) -> float:
        """Idle time ÷ (n_ranks × makespan); the median over measured steps."""
        return float((1 - self.steps["busy_ms"] / (self.n_ranks * self.steps["makespan_ms"])).median())

    @property
    def bubble_overhead(self) -> float:
        """Idle time ÷ busy time; the median over measured steps."""
        return float((self.n_ranks * self.steps["makespan_ms"] / self.steps["busy_ms"] - 1).median())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step ÷ its makespan; the median over measured steps, NaN where tokens are unknown."""
        return float((self.steps["n_tokens"] / self.steps["makespan_ms"] * 1e3).median())

    def peak_in_flight(self) -> pd.Series:
        """Most units (microbatch slices) on each rank whose forward is done and whose backward is not.

        A unit is held from its F to its B, or to its W where the backward is split; without any backward,
        only while its F runs. Index = rank.
        """
        rows = self.measured.sort_values(["step", "rank", "start_ms"], kind="stable")
        return count_held(rows).groupby(rows["rank"]).max().rename("peak_in_flight")

    def peak_bytes(self) -> pd.Series:
        """Most bytes on each rank once any action has ended; index = rank.

        Raises
        ------
        TimelineError
            Where bytes are not known.
        """
        return find_peak_bytes(self)

    def budget(self, cost: Costs | None = None, contention: float | None = None) -> pd.Series:
        """Where the ranks' time went, in rank-milliseconds; adds up to n_ranks × makespan_ms.

        Each part is what the step is shorter without its cause, times the ranks, in a stated order
        (`timeline.budget`): runtime, communication, contention, slicing_overhead, dependency, and of what
        is left fill, drain and useful compute. "unexplained" is what a replay of the step on its own times
        does not reproduce. A part can be negative: slices can run faster than the whole, and equal actions
        can take longer than those that differ.

        A simulation knows what its compute takes alone and whole. Of other timelines, contention is split
        off only where `contention` says how strong it was, slicing_overhead only where `cost` says what a
        microbatch takes whole; what is not split off stays in "compute", which stands in place of "useful".
        So it does where a simulation's cost model does not reach to a whole microbatch.

        Parameters
        ----------
        cost : CostModel or list of CostModel, optional
            Of one stage, or one for each, for a timeline that is not simulated; only the ratio of a
            microbatch whole to its slices is taken from it.
        contention : float, optional
            ≥ 1, for a timeline that is not simulated (`Profile.contention`): while two or more actions ran,
            each did 1/contention of its work. 1 says that there was none, as on emulated ranks.

        Raises
        ------
        TimelineError
            Where an action is in a step twice; with `cost`, where slice lengths are unknown or slices missing.
        CostError
            Where `cost` does not know what a whole microbatch takes, or for a contention below 1.
        """
        return find_budget(self, cost, contention)

    def critical_path(self, step: int | None = None) -> pd.DataFrame:
        """The chain of actions, each started by the one before it, that ends the step; first action first.

        Durations and gaps add up to the makespan.

        Parameters
        ----------
        step : int, optional
            By default the measured step with the median makespan, of two the faster.

        Returns
        -------
        DataFrame
            The rows of `frame`, with blocked_by the row before, gap_ms (from that one's end to the start)
            and reason: "order" (the action before it on its rank), "input" (from its own rank), "message"
            (from another rank), "" for the first.

        Raises
        ------
        TimelineError
            For a step that is not there, or one that has an action twice.
        """
        chosen = self.median_step if step is None else step
        rows = self.frame[self.frame["step"] == chosen]
        if rows.empty:
            available = ", ".join(str(each) for each in sorted(self.frame["step"].unique()))
            raise TimelineError(f"no step {step!r} in this timeline; available: {available}.")
        return find_path(rows)

    @property
    def median_step(self) -> int:
        """The measured step with the median makespan, of two the faster."""
        by_makespan = self.steps["makespan_ms"].sort_values(kind="stable").index
        return int(by_makespan[(len(by_makespan) - 1) // 2])
