"""A schedule from a family's name: the checks that come before its generator runs."""

from collections.abc import Mapping

from terapipe.errors import ScheduleError, check_integer, unknown_name
from terapipe.schedule.orders.family import Family
from terapipe.schedule.orders.pipeline import Pipeline
from terapipe.schedule.orders.registry import FAMILIES
from terapipe.schedule.schedule import Schedule
from terapipe.slicing import Slicing


def build_schedule(
    name: str, n_ranks: int, slicing: Slicing | str, chunks_per_rank: int | None = None, **options: int
) -> Schedule:
    """The schedule of a family.

    Parameters
    ----------
    name : str
        One of the families of `schedules()`.
    n_ranks : int
        Pipeline ranks.
    slicing : Slicing or str
        Microbatches and slices; families of whole microbatches refuse slices.
    chunks_per_rank : int, optional
        Stages on each rank; the family's own number by default.
    **options
        What the family needs besides: `max_in_flight` units on a rank for svpp.

    Raises
    ------
    ScheduleError
        For an unknown name or option, or what the family cannot run; names the nearest that can.

    Examples
    --------
    >>> import terapipe as tp
    >>> print(tp.build_schedule("seq1f1b-zb", 2, "[(1, [4, 2])]"))
    step  rank 0  rank 1
       0  0F0.0   1F0.0
       1  0F0.1   1F0.1
       2  0I0.1   1I0.1
       3  0W0.1   1I0.0
       4  0I0.0   1W0.1
       5  0W0.0   1W0.0
    """
    if name not in FAMILIES:
        raise ScheduleError(unknown_name("schedule", name, FAMILIES))
    family = FAMILIES[name]
    n_ranks = check_integer("n_ranks", n_ranks, 1, ScheduleError)
    slicing = Slicing.parse(slicing) if isinstance(slicing, str) else slicing
    _check_options(family, options)
    pipeline = Pipeline(n_ranks, slicing, _chunks(family, chunks_per_rank))
    misfit = family.find_misfit(pipeline)
    if misfit:
        raise ScheduleError(f"{misfit} {_name_nearest(family, pipeline)}")
    orders = family.generate(pipeline, **options)
    return Schedule(tuple(map(tuple, orders)), slicing, name)


def _chunks(family: Family, asked: int | None) -> int:
    if asked is None:
        return family.chunks
    chunks = check_integer("chunks_per_rank", asked, 1, ScheduleError)
    if not family.any_chunks and chunks != family.chunks:
        stages = "one stage" if family.chunks == 1 else "two stages"
        others = ", ".join(repr(each.name) for each in FAMILIES.values() if each.any_chunks)
        raise ScheduleError(
            f"chunks_per_rank={chunks}: {family.name} places {stages} on each rank. Use chunks_per_rank={family.chunks} "
            f"or leave it out; or a family that takes any number ({others}); or type the order (Schedule.from_orders)."
        )
    return chunks


def _check_options(family: Family, options: Mapping[str, int]) -> None:
    for key in options:
        if key in family.options:
            continue
        if family.options:
            raise ScheduleError(unknown_name(f"option of {family.name}", key, family.options))
        takers = [each.name for each in FAMILIES.values() if key in each.options]
        hint = f" {key} is an option of {', '.join(takers)}." if takers else ""
        raise ScheduleError(f"{key}={options[key]!r}: {family.name} has no options. Leave it out.{hint}")
    for key, meaning in family.options.items():
        if key not in options:
            raise ScheduleError(
                f"{family.name} needs the option {key}: {meaning}. Give it: build_schedule({family.name!r}, …, {key}=…), "
                "and pass that Schedule where a family's name is not enough (RunSpec(schedule=…), sweep)."
            )


def _name_nearest(family: Family, pipeline: Pipeline) -> str:
    """What to use instead: the nearest family that runs the same slicing on the same ranks."""
    for name in family.alternatives:
        other = FAMILIES[name]
        chunks = pipeline.chunks_per_rank if other.any_chunks else other.chunks
        if not other.find_misfit(Pipeline(pipeline.n_ranks, pipeline.slicing, chunks)):
            return f"Use {name!r}, the nearest family that can, or another slicing."
    return "Use another slicing."
