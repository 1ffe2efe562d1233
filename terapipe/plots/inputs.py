"""What the figures accept, turned into values to draw; refuses what cannot be drawn. Knows no plotly."""

import reprlib
from collections.abc import Mapping
from typing import TypeVar

import pandas as pd

from terapipe.errors import SlicingError, TimelineError
from terapipe.search import SlicingSearch
from terapipe.slicing import Slicing, SlicingPlan
from terapipe.timeline import Timeline

TimelineLike = Timeline | pd.DataFrame
SlicingLike = SlicingPlan | SlicingSearch | Slicing | str
Item = TypeVar("Item")


def as_timeline(given: object) -> Timeline:
    """A timeline, given as one or as its table."""
    timeline = Timeline.from_frame(given) if isinstance(given, pd.DataFrame) else given
    if not isinstance(timeline, Timeline):
        raise TimelineError(
            f"{reprlib.repr(given)} is not a timeline; give a Timeline (tp.simulate(…), run.timeline) "
            "or a DataFrame with the columns of one."
        )
    return timeline


def one_step(timeline: Timeline, step: int | None) -> tuple[Timeline, str]:
    """One step of a timeline, and a note on which; by default the lower median of the measured steps by makespan."""
    steps = timeline.frame["step"]
    available = sorted(int(each) for each in steps.unique())
    if step is not None and step not in available:
        raise TimelineError(f"no step {step!r} in this timeline; available: {', '.join(map(str, available))}.")
    chosen = timeline.median_step if step is None else step
    note = "" if len(available) == 1 else f"step {chosen}"
    if step is None and len(timeline.steps) > 1:
        note += f", the median of {len(timeline.steps)}"
    return Timeline(timeline.frame[steps == chosen], lambda: timeline.memory[timeline.memory["step"] == chosen]), note


def as_slicing(given: object) -> Slicing:
    """The slicing of a plan or a search, of text in the paper's notation, or itself."""
    if isinstance(given, SlicingPlan | SlicingSearch):
        return given.slicing
    if isinstance(given, str):
        return Slicing.parse(given)
    if isinstance(given, Slicing):
        return given
    raise SlicingError(
        f"{reprlib.repr(given)} is not a slicing; give a Slicing, a SlicingPlan, a SlicingSearch or notation "
        "like '[(1, [776, 640, 632])] * 16'."
    )


def by_name(given: Item | Mapping[str, Item]) -> dict[str, Item]:
    """A single value under an empty name, or the mapping of names as a dictionary."""
    return {str(name): item for name, item in given.items()} if isinstance(given, Mapping) else {"": given}
