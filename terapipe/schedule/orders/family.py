"""A schedule family, as a value: how its orders are made, what it can run, and what is known of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from terapipe.schedule.action import Kind
from terapipe.schedule.orders.pipeline import Order, Pipeline

TakesSlices = Literal["any", "whole", "equal"]


@dataclass(frozen=True)
class Family:
    """One family of schedules.

    The formulas are in milliseconds of one microbatch on one rank: t_F forward, t_B full backward,
    t_I input gradient, t_W weight gradient. They hold for equal ranks, free messages and slices
    that take equal time. P, r, v, M, k and N are those of `orders.pipeline`.

    Attributes
    ----------
    name : str
    generate : function
        (pipeline, **options) → every rank's order.
    takes_slices : str
        "any"; "equal": as many in every microbatch as in any other; "whole": one in every microbatch.
    chunks : int
        Stages on each rank, where none are asked for.
    any_chunks : bool
        Whether any other number of stages will do.
    options : mapping
        Name → what it is; all are needed.
    misfit : function
        Pipeline → what else keeps the family from running it; "" for nothing.
    alternatives : tuple of str
        Families to name where this one cannot run a slicing, nearest first.
    kinds : str
        The actions it uses: "FB", "FIW", "FBIW" or "F".
    runs_on_ranks : bool
        Whether it is tried on computing ranks too; every family is simulated.
    bubble, condition : str
        A rank's idle time in a step, makespan − busy time, and when it is that.
    peak_activations : str
        On rank r, in activations of one microbatch on one rank; never more than M.
    source : str
    """

    name: str
    generate: Callable[..., list[Order]]
    bubble: str
    peak_activations: str
    source: str
    condition: str = ""
    takes_slices: TakesSlices = "any"
    chunks: int = 1
    any_chunks: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    misfit: Callable[[Pipeline], str] = lambda pipeline: ""
    alternatives: tuple[str, ...] = ()
    kinds: str = "FB"
    runs_on_ranks: bool = True

    @property
    def splits_backward(self) -> bool:
        """Whether some backwards run as I and W."""
        return Kind.W in self.kinds

    def find_misfit(self, pipeline: Pipeline) -> str:
        """What keeps the family from running a pipeline; "" for nothing."""
        slicing, n_slices = pipeline.slicing, pipeline.n_slices
        if self.takes_slices == "whole" and n_slices > 1:
            return f"{self.name} runs whole microbatches; the slicing {slicing} has up to {n_slices} slices in one."
        if self.takes_slices == "equal" and not pipeline.has_equal_counts:
            fewest = min(microbatch.n_slices for microbatch in slicing.microbatches)
            return (
                f"{self.name} needs as many slices in every microbatch as in any other; the slicing {slicing} has "
                f"{fewest} in one and {n_slices} in another."
            )
        return self.misfit(pipeline)
