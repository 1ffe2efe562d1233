"""Random schedules: the legal ones validate, simulate and run; the broken ones are refused with the bad cell; none hangs.

What is legal is said here from the definitions alone: the actions that there must be, and an order
that the second simulator (reference.py) can run to its end.
"""

import random
import re
from functools import cache

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import small_model
from reference import Orders, Stuck, inputs, split, times
from strategies import PROPERTY, random_homes, random_orders, random_slicing, schedules

import terapipe as tp
from terapipe.errors import DeadlockError, ScheduleError

DURATION = {"F": 1.0, "B": 2.5, "I": 1.75, "W": 0.75}
COST = tp.CallableCost(lambda l, c, b: 1.0, lambda l, c, b: 2.5, weight_ms=lambda l, c, b: 0.75)
MODEL = small_model(n_layers=8, d_model=8, n_heads=2, dropout=0.1)


def scheduled(orders: Orders, slicing: tp.Slicing) -> tp.Schedule:
    return tp.Schedule.from_orders(dict(enumerate(orders)), slicing)


def can_run(orders: Orders, slicing: tp.Slicing) -> bool:
    """Every stage on one rank, with an F and a B, or an I and a W, for each slice (or F alone); and the end is reached."""
    texts = [text for order in orders for text in order]
    units = {(m, s) for m, each in enumerate(slicing.microbatches) for s in range(each.n_slices)}
    homes = {(split(text)[0], rank) for rank, order in enumerate(orders) for text in order}
    stages = range(1 + max(stage for stage, _ in homes))
    kinds = {(stage, *unit): "" for stage in stages for unit in units}
    for text in sorted(texts):
        stage, kind, *unit = split(text)
        if (stage, *unit) not in kinds:
            return False
        kinds[(stage, *unit)] += kind
    complete = set(kinds.values()) <= {"BF", "FIW"} or set(kinds.values()) == {"F"}
    if not all(orders) or sorted(stage for stage, _ in homes) != list(stages) or not complete:
        return False
    try:
        times(orders, lambda *action: 1.0)
    except Stuck:
        return False
    return True


def mutated(rng: random.Random, orders: Orders) -> list[list[str]]:
    """One thing changed: two actions swapped, one moved, removed, repeated, or another number or kind in its text."""
    orders = [list(order) for order in orders]
    rank = rng.randrange(len(orders))
    order = orders[rank]
    step = rng.randrange(len(order))
    how = rng.choice(["swap", "move", "move to any rank", "remove", "repeat", "kind", "stage", "microbatch", "slice"])
    if how == "swap":
        other = rng.randrange(len(order))
        order[step], order[other] = order[other], order[step]
    elif how in ("move", "remove"):
        text = order.pop(step)
        if how == "move":
            order.insert(rng.randint(0, len(order)), text)
    elif how in ("move to any rank", "repeat"):
        text = order.pop(step) if how == "move to any rank" else order[step]
        target = rng.choice(orders)
        target.insert(rng.randint(0, len(target)), text)
    else:
        parts = dict(zip(("stage", "kind", "microbatch", "slice"), split(order[step]), strict=True))
        parts[how] = rng.choice("FBIW") if how == "kind" else max(0, parts[how] + rng.choice([-1, 1, 2]))
        order[step] = "{stage}{kind}{microbatch}.{slice}".format(**parts)
    return orders


def marked(message: str) -> list[str]:
    return re.findall(r">([^ <]+)<", message)


def assert_cycle(error: DeadlockError, orders: Orders) -> None:
    """Each action needs the next one named, which stands at or behind where the next rank waits."""
    for (rank, waiting, needed), (other, blocked, _) in zip(error.cycle, [*error.cycle[1:], error.cycle[0]], strict=True):
        assert needed in inputs(waiting)
        assert waiting in orders[rank]
        assert orders[other].index(blocked) <= orders[other].index(needed)
    if len(error.cycle) > 1:
        assert len({rank for rank, _, _ in error.cycle}) == len(error.cycle)
    assert sorted(marked(str(error))) == sorted(waiting for _, waiting, _ in error.cycle)


def assert_bad_cell(message: str, orders: Orders, slicing: tp.Slicing) -> None:
    """What the message says of the actions marked in its grid is so."""
    texts = [text for order in orders for text in order]
    cells, said = marked(message), message.splitlines()[0]
    units = {(m, s) for m, each in enumerate(slicing.microbatches) for s in range(each.n_slices)}
    kinds = sorted(split(cell)[1] for cell in cells) if cells != ["nothing"] else []
    if found := re.match(r"(\S+) is missing on rank (\d+)\.", said):
        assert found[1] not in texts
        assert cells == ["nothing"]
    elif found := re.match(r"(\S+) appears twice", said):
        assert texts.count(found[1]) > 1
        assert cells == [found[1]] * 2
    elif found := re.match(r"(\S+) \(rank \d+, step \d+\) does not exist", said):
        assert split(found[1])[2:] not in units
        assert cells == [found[1]]
    elif "either B or I and W, not both" in said:
        assert len({(split(cell)[0], *split(cell)[2:]) for cell in cells}) == 1
        assert "B" in kinds
        assert len(kinds) > 1
    elif found := re.match(r"stage (\d+) is on rank", said):
        assert [split(cell)[0] for cell in cells] == [int(found[1])]
        assert sum(any(split(text)[0] == int(found[1]) for text in order) for order in orders) > 1
    elif found := re.match(r"no rank runs stage (\d+) of", said):
        assert not any(split(text)[0] == int(found[1]) for text in texts)
        assert split(cells[0])[0] == max(split(text)[0] for text in texts)
    else:
        rank = int(re.match(r"rank (\d+) has no actions", said)[1])
        assert not orders[rank]


class TestLegal:
    @pytest.mark.timeout(240)
    @given(schedules())
    @settings(PROPERTY, max_examples=1000)
    def test_1000_random_orders_validate_and_simulate_as_the_reference_runs_them(self, drawn):
        orders, slicing = drawn
        assert can_run(orders, slicing)
        frame = tp.simulate(scheduled(orders, slicing).validate(), COST).frame
        texts = frame["stage"].astype(str) + frame["kind"] + frame["microbatch"].astype(str) + "." + frame["slice"].astype(str)
        expected = times(orders, lambda stage, kind, m, s: DURATION[kind])
        assert dict(zip(texts, frame["start_ms"], strict=True)) == pytest.approx(
            {text: start for text, (start, _) in expected.items()}, rel=1e-9, abs=1e-9
        )


class TestBroken:
    @pytest.mark.timeout(240)
    @given(schedules(), st.integers(0, 2**32))
    @settings(PROPERTY, max_examples=1000)
    def test_1000_mutations_are_still_legal_or_refused_with_the_bad_cell(self, drawn, seed):
        orders, slicing = drawn
        orders = mutated(random.Random(seed), orders)
        if can_run(orders, slicing):
            scheduled(orders, slicing).validate()
            return
        with pytest.raises(ScheduleError) as refused:
            scheduled(orders, slicing).validate()
        if isinstance(refused.value, DeadlockError):
            assert_cycle(refused.value, orders)
        else:
            assert_bad_cell(str(refused.value), orders, slicing)


def shortest_cycle(orders: Orders) -> int:
    """The fewest ranks that wait in a cycle: breadth first from every wait for an action of another rank."""
    places = {text: (rank, step) for rank, order in enumerate(orders) for step, text in enumerate(order)}
    waits = [
        (places[text], places[need])
        for text in places
        for need in inputs(text)
        if places.get(need, places[text])[0] != places[text][0]
    ]
    lengths = []
    for first in waits:
        seen, front, n_waits = {first}, [first], 1
        while front:
            if any(need[0] == first[0][0] and need[1] >= first[0][1] for _, need in front):
                lengths.append(n_waits)
                break
            front = [
                wait
                for wait in waits
                if wait not in seen and any(wait[0][0] == need[0] and wait[0][1] <= need[1] for _, need in front)
            ]
            seen.update(front)
            n_waits += 1
    return min(lengths)


@cache
def deadlocks() -> list[tuple[list[list[str]], tp.Slicing, DeadlockError]]:
    """The first 50 deadlocks met while one or two random moves at a time break random legal orders."""
    found: list[tuple[list[list[str]], tp.Slicing, DeadlockError]] = []
    for seed in range(5000):
        rng = random.Random(seed)
        slicing = random_slicing(rng, max_tokens=4, max_microbatches=2, max_slices=2)
        orders = random_orders(rng, slicing, random_homes(rng, rng.randint(2, 4), 2), rng.choice([0.0, 1.0]))
        for order in rng.choices(orders, k=rng.randint(1, 2)):
            order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
        try:
            scheduled(orders, slicing).validate()
        except DeadlockError as error:
            found += [(orders, slicing, error)] if len(error.cycle) > 1 else []
        if len(found) == 50:
            return found
    raise AssertionError(f"only {len(found)} deadlocks in 5,000 random schedules")


class TestDeadlocks:
    """What is said of 50 deadlocks, each held against an exhaustive search."""

    def test_50_are_each_explained_by_a_cycle_of_needs_and_orders(self):
        for orders, _, error in deadlocks():
            assert str(error).startswith("deadlock: ")
            assert_cycle(error, orders)

    def test_50_cycles_are_the_shortest_there_are(self):
        lengths = [len(error.cycle) for _, _, error in deadlocks()]
        assert lengths == [shortest_cycle(orders) for orders, _, _ in deadlocks()]
        assert set(lengths) >= {2, 3}

    def test_a_repair_named_makes_all_valid_and_no_shorter_move_does(self):
        repaired = 0
        for orders, slicing, error in deadlocks():
            distance = max(map(len, orders))
            if error.repair is not None:
                fixed = scheduled(orders, slicing).move(*error.repair).validate()
                name, step = error.repair
                rank, place = next((rank, order.index(name)) for rank, order in enumerate(orders) if name in order)
                assert f"Moving {name} to step {step} of rank {rank} repairs it." in str(error)
                assert str(fixed.orders[rank][step]) == name
                distance = abs(step - place)
                repaired += 1
            else:
                assert "No move of a single action repairs it." in str(error)
            assert not any(can_run(moved, slicing) for moved in moves_shorter_than(distance, orders))
        assert 10 <= repaired < 50  # both answers are met


def moves_shorter_than(distance: int, orders: Orders) -> list[list[list[str]]]:
    """The orders after every move of one action within its rank by fewer steps."""
    found = []
    for rank, order in enumerate(orders):
        for step, text in enumerate(order):
            for target in range(max(0, step - distance + 1), min(len(order), step + distance)):
                rest = [*order[:step], *order[step + 1 :]]
                changed = [*rest[:target], text, *rest[target:]]
                found += [[*orders[:rank], changed, *orders[rank + 1 :]]] if target != step else []
    return found


def real_run(seed: int) -> tp.RunSpec:
    """Stages on 2 to 4 ranks, not equally many on each, any legal order, B or I and W."""
    rng = random.Random(seed)
    n_ranks = 2 + seed % 3
    slicing = random_slicing(rng, max_tokens=12, max_microbatches=3, max_slices=4)
    orders = random_orders(rng, slicing, random_homes(rng, n_ranks, 2), (0.0, 0.5, 1.0)[seed // 3 % 3])
    return tp.RunSpec(MODEL, slicing, scheduled(orders, slicing), n_ranks=n_ranks, dtype="float64", seed=seed)


@cache
def verified() -> tuple[list[tp.RunSpec], pd.DataFrame]:
    """The 50 runs, in one launch for each number of ranks."""
    specs = [real_run(seed) for seed in range(50)]
    return specs, tp.verify(specs)


@pytest.mark.timeout(180)
class TestRealRuns:
    @pytest.mark.parametrize("seed", range(50))
    def test_every_gradient_and_the_loss_of_a_random_order_equal_one_process(self, seed):
        report = verified()[1]
        errors = report[report["spec"] == seed].set_index("name")["max_relative_error"]
        assert "loss" in errors.index
        assert len(errors) > 8 * MODEL.n_layers
        assert (errors <= 1e-10).all(), f"\n{errors[~(errors <= 1e-10)]}"

    def test_they_cover_2_to_4_ranks_several_stages_a_rank_and_both_kinds_of_backward(self):
        specs = verified()[0]
        kinds = [{action.kind for order in spec.schedules[0].orders for action in order} for spec in specs]
        assert {spec.n_ranks for spec in specs} == {2, 3, 4}
        assert sum(spec.schedules[0].n_stages > spec.n_ranks for spec in specs) > 20
        assert sum(kind >= {"I", "W"} for kind in kinds) > 20
        assert sum(kind == {"F", "B"} for kind in kinds) > 10
        assert sum(not spec.slicings[0].is_whole for spec in specs) > 20
