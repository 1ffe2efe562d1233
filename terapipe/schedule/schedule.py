"""A schedule: rank → ordered compute actions, for one slicing. It is data, and travels as text."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from terapipe.errors import ScheduleError
from terapipe.schedule import edit, torch_csv
from terapipe.schedule.action import COMPUTE, Action, Kind
from terapipe.schedule.diff import ScheduleDiff, compare_orders
from terapipe.schedule.graph import Graph
from terapipe.schedule.grid import format_around, format_grid
from terapipe.schedule.validate import validate
from terapipe.slicing import Slicing

EDITED = ", edited"  # what an edit adds to a schedule's name
LARGEST = 10**9  # of the numbers in an action, so that all fit arrays of 64-bit integers
Order = str | Iterable[str | Action]


@dataclass(frozen=True)
class Schedule:
    """Which compute actions each rank runs, in order. Sends and receives follow from it (`lower`).

    Attributes
    ----------
    orders : tuple of tuple of Action
        `orders[rank]`.
    slicing : Slicing
        The microbatches and slices that the actions name.
    name : str
        The family it was built by, or "custom".
    """

    orders: tuple[tuple[Action, ...], ...]
    slicing: Slicing
    name: str = "custom"

    @classmethod
    def from_orders(cls, orders: Mapping[int, Order], slicing: Slicing | str, name: str = "custom") -> "Schedule":
        """A schedule typed by hand: {rank: ["0F0.0", …]} or {rank: "0F0.0 0F0.1 …"}.

        Raises
        ------
        ScheduleError
            Where ranks are not 0…n−1, or an entry is not a compute action.
        """
        slicing = Slicing.parse(slicing) if isinstance(slicing, str) else slicing
        if not orders or sorted(orders) != list(range(len(orders))):
            raise ScheduleError(f"orders for ranks {sorted(orders)}; they must be ranks 0…n−1, each once.")
        return cls(tuple(_read_order(rank, orders[rank]) for rank in range(len(orders))), slicing, name)

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @cached_property
    def n_stages(self) -> int:
        """Number of stages named."""
        return 1 + max((action.stage for order in self.orders for action in order), default=-1)

    @cached_property
    def stage_to_rank(self) -> tuple[int, ...]:
        """The rank on which each stage lives.

        Raises
        ------
        ScheduleError
            Where a stage appears on two ranks, or on none.
        """
        homes: dict[int, int] = {}
        for rank, order in enumerate(self.orders):
            for stage in {action.stage for action in order}:
                if homes.setdefault(stage, rank) != rank:
                    step, action = next((step, each) for step, each in enumerate(order) if each.stage == stage)
                    raise ScheduleError(
                        f"stage {stage} is on rank {homes[stage]} and, at step {step}, on rank {rank} ({action}); "
                        f"a stage lives on exactly one rank.\n{format_around(self.orders, [(rank, step)])}"
                    )
        absent = next((stage for stage in range(self.n_stages) if stage not in homes), None)
        if absent is not None:
            last = self.n_stages - 1
            rank = homes[last]
            step, action = next((step, each) for step, each in enumerate(self.orders[rank]) if each.stage == last)
            raise ScheduleError(
                f"no rank runs stage {absent} of stages 0…{last}, which {action} (rank {rank}, step {step}) asks for."
                f"\n{format_around(self.orders, [(rank, step)])}"
            )
        return tuple(homes[stage] for stage in range(self.n_stages))

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions: with W it splits backwards, with F alone it trains nothing."""
        return frozenset(action.kind for order in self.orders for action in order)

    @property
    def chunks_per_rank(self) -> int:
        """The most stages on any rank."""
        return max((self.stage_to_rank.count(rank) for rank in range(self.n_ranks)), default=0)

    @cached_property
    def graph(self) -> Graph:
        """The actions and their dependencies as arrays; raises where the schedule is invalid."""
        return validate(self.orders, self.slicing, self.stage_to_rank)

    def validate(self) -> "Schedule":
        """Return the schedule itself if every action is there, in a possible order, without deadlock.

        Raises
        ------
        ScheduleError
            With the step × rank grid, the bad cell marked.
        """
        self.graph  # noqa: B018 - building it checks
        return self

    def __str__(self) -> str:
        return format_grid(self.orders)

    def to_csv(self, path: str | Path) -> Path:
        """Write one row a rank, one cell an action."""
        return _write_rows(path, [[str(action) for action in order] for order in self.orders])

    @classmethod
    def from_csv(cls, path: str | Path, slicing: Slicing | str, name: str = "custom") -> "Schedule":
        """Read what `to_csv` wrote; blank cells are idle steps and left out."""
        return cls.from_orders(dict(enumerate(_read_rows(path))), slicing, name)

    def to_torch_csv(self, path: str | Path) -> Path:
        """Write the compute-order CSV that torch.distributed.pipelining loads: cells like "2F0", one row a rank.

        Raises
        ------
        ScheduleError
            Where a microbatch is cut into slices, which torch's actions cannot name, or the schedule
            is invalid.
        """
        rows = torch_csv.format_rows(self.validate().orders, self.slicing)
        return _write_rows(path, rows)

    @classmethod
    def from_torch_csv(
        cls,
        path: str | Path,
        slicing: Slicing | str | None = None,
        seq_tokens: int | None = None,
        name: str = "custom",
    ) -> "Schedule":
        """Read a CSV of torch.distributed.pipelining, of the compute order or lowered.

        Parameters
        ----------
        path
            One row a rank, cells like "2F0"; blank cells are idle steps.
        slicing, seq_tokens
            Either of them: the whole microbatches that the actions name, or the tokens of one, as the
            file says how many there are but not how long.
        name
            Of the schedule.

        Raises
        ------
        ScheduleError
            For a cell that is no action of torch's, a slicing that cuts microbatches, and where not
            exactly one of `slicing` and `seq_tokens` is given.
        """
        rows = torch_csv.read_rows(_read_rows(path))
        return cls.from_orders(dict(enumerate(rows)), torch_csv.find_slicing(rows, slicing, seq_tokens), name)

    def move(self, action: str | Action, step: int) -> "Schedule":
        """A copy, not yet validated, with an action at another step of its rank; those between shift by one."""
        return self._edited(edit.move(self.orders, _read_action(action, "move"), step))

    def swap(self, first: str | Action, second: str | Action) -> "Schedule":
        """A copy, not yet validated, with two actions of one rank in each other's place."""
        return self._edited(edit.swap(self.orders, _read_action(first, "swap"), _read_action(second, "swap")))

    def insert(self, rank: int, step: int, action: str | Action) -> "Schedule":
        """A copy, not yet validated, with one more action; those from its step on shift by one."""
        return self._edited(edit.insert(self.orders, rank, step, _read_action(action, "insert")))

    def remove(self, action: str | Action) -> "Schedule":
        """A copy, not yet validated, without an action; those behind it shift by one."""
        return self._edited(edit.remove(self.orders, _read_action(action, "remove")))

    def diff(self, other: "Schedule") -> ScheduleDiff:
        """The actions that moved from this schedule to another, and those that only one of them has."""
        if not isinstance(other, Schedule):
            raise ScheduleError(f"diff({other!r}): needs another Schedule.")
        slicings = (str(self.slicing), str(other.slicing))
        return ScheduleDiff(compare_orders(self.orders, other.orders), (self.name, other.name), slicings)

    def _edited(self, orders: tuple[tuple[Action, ...], ...]) -> "Schedule":
        return Schedule(orders, self.slicing, self.name.removesuffix(EDITED) + EDITED)


def _write_rows(path: str | Path, rows: Iterable[Iterable[str]]) -> Path:
    path = Path(path)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def _read_rows(path: str | Path) -> list[list[str]]:
    """The cells of a CSV without the blank ones, which are idle steps; blank lines at the end are no ranks."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = [[cell for cell in row if cell.strip()] for row in csv.reader(file)]
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ScheduleError(f"{path} is empty; it needs one row a rank.")
    return rows


def _read_order(rank: int, order: Order) -> tuple[Action, ...]:
    entries = order.replace(",", " ").split() if isinstance(order, str) else order
    actions = tuple(_read_action(entry, f"rank {rank}, step {step}") for step, entry in enumerate(entries))
    if not actions:
        raise ScheduleError(f"rank {rank} has no actions; every rank runs at least one stage. Leave the rank out.")
    return actions


def _read_action(entry: object, where: str) -> Action:
    if isinstance(entry, Action):
        entry = str(entry)  # read back like any text, which checks it
    if not isinstance(entry, str):
        raise ScheduleError(f"{where}: {entry!r} is not an action; write text like '2F0.3', or an Action.")
    action = Action.parse(entry)
    if max(action.stage, action.microbatch, action.slice) > LARGEST:
        raise ScheduleError(f"{where}: {action} has a number beyond {LARGEST:,}; stages, microbatches and slices count from 0.")
    if action.kind not in COMPUTE:
        raise ScheduleError(
            f"{where}: {action} is a transfer. A schedule lists compute actions (F, B, I, W); "
            "sends and receives are added by lower()."
        )
    return action
