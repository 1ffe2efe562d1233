"""Editing a schedule in a cell, and what differs between two: each edit typed out, then laws over random schedules."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, schedules

import terapipe as tp
from terapipe.errors import DeadlockError, ScheduleError
from terapipe.schedule import Action, Kind
from terapipe.schedule.diff import Change, compare_orders

TYPED = tp.Schedule.from_orders({0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1"}, "[(1, [4])] * 2", "typed")


def texts(schedule: tp.Schedule) -> list[str]:
    return [" ".join(map(str, order)).replace(".0", "") for order in schedule.orders]


class TestMove:
    @pytest.mark.parametrize(
        ("action", "step", "expected"),
        [
            ("0F0", 0, "0F0 0F1 0B0 0B1"),
            ("0F0", 1, "0F1 0F0 0B0 0B1"),
            ("0F0", 3, "0F1 0B0 0B1 0F0"),
            ("0B1", 0, "0B1 0F0 0F1 0B0"),
            ("0B1", 2, "0F0 0F1 0B1 0B0"),
        ],
    )
    def test_the_action_ends_at_the_step_and_those_between_shift(self, action, step, expected):
        assert texts(TYPED.move(action, step)) == [expected, "1F0 1B0 1F1 1B1"]

    def test_the_given_schedule_stays_and_the_copy_says_that_it_is_edited_once(self):
        edited = TYPED.move("0B1", 0).move(Action(0, Kind.B, 1), 3)
        assert edited.orders == TYPED.orders
        assert (TYPED.name, edited.name) == ("typed", "typed, edited")
        assert edited.slicing is TYPED.slicing

    def test_a_step_beyond_the_rank_is_refused_with_its_steps(self):
        with pytest.raises(ScheduleError, match=r"step=4: 0F0\.0 is on rank 0, whose steps are 0…3"):
            TYPED.move("0F0", 4)

    @pytest.mark.parametrize("step", [-1, "1", 0.5, True, None])
    def test_what_is_no_step_is_refused(self, step):
        with pytest.raises(ScheduleError, match=re.escape(f"step={step!r}: needs an integer of at least 0")):
            TYPED.move("0F0", step)

    def test_an_absent_action_is_refused_with_what_there_is_of_its_slice(self):
        with pytest.raises(
            ScheduleError, match=r"2F0\.0 is not in the schedule. Of microbatch 0, slice 0 it has 0F0\.0, 0B0\.0, 1F0"
        ):
            TYPED.move("2F0", 0)
        with pytest.raises(ScheduleError, match=r"0F7\.1 is not in the schedule. It has nothing of microbatch 7, slice 1"):
            TYPED.move("0F7.1", 0)

    def test_what_is_no_action_is_refused_as_when_typed(self):
        with pytest.raises(ScheduleError, match=r"'0X0'.*unknown kind"):
            TYPED.move("0X0", 0)
        with pytest.raises(ScheduleError, match=r"move: 0SEND_F0\.0 is a transfer"):
            TYPED.move("0SEND_F0", 0)
        with pytest.raises(ScheduleError, match="move: None is not an action"):
            TYPED.move(None, 0)

    def test_a_repeated_action_is_refused_as_unclear_with_its_cells(self):
        with pytest.raises(ScheduleError, match=r"0F0\.0 is there 2 times, at step 0 of rank 0, step 3 of rank 0") as refused:
            TYPED.insert(0, 3, "0F0").move("0F0", 1)
        assert str(refused.value).count(">0F0.0<") == 2

    def test_an_error_names_the_move_that_repairs_it(self):
        deadlocked = TYPED.move("1F1", 1).swap("0B0", "0F1")
        with pytest.raises(DeadlockError) as refused:
            deadlocked.validate()
        assert refused.value.cycle == ((0, "0B0.0", "1B0.0"), (1, "1F1.0", "0F1.0"))
        deadlocked.move(*refused.value.repair).validate()


class TestSwapInsertRemove:
    def test_two_actions_of_a_rank_change_places(self):
        assert texts(TYPED.swap("0F1", "0B1")) == ["0F0 0B1 0B0 0F1", "1F0 1B0 1F1 1B1"]
        assert TYPED.swap("0F1", "0F1").orders == TYPED.orders

    def test_actions_of_two_ranks_do_not_swap_and_both_are_marked(self):
        with pytest.raises(
            ScheduleError, match=r"0F1\.0 is on rank 0 and 1B0\.0 on rank 1; only actions of one rank"
        ) as refused:
            TYPED.swap("0F1", "1B0")
        assert ">0F1.0< >1B0.0<" in str(refused.value)

    @pytest.mark.parametrize("step", [0, 1, 4])
    def test_an_inserted_action_stands_at_its_step(self, step):
        edited = TYPED.insert(1, step, "1W0")
        assert str(edited.orders[1][step]) == "1W0.0"
        assert edited.remove("1W0").orders == TYPED.orders

    @pytest.mark.parametrize(
        ("rank", "step", "said"),
        [
            (2, 0, "rank=2: the schedule has ranks 0…1. Type more with Schedule.from_orders"),
            (-1, 0, "rank=-1"),
            (1, 5, "step=5: on rank 1 an action can be inserted at steps 0…4"),
            (1, -1, "step=-1"),
        ],
    )
    def test_a_place_that_is_not_there_is_refused_with_those_that_are(self, rank, step, said):
        with pytest.raises(ScheduleError, match=re.escape(said)):
            TYPED.insert(rank, step, "1F2")

    def test_a_removed_action_is_missed_by_validate(self):
        with pytest.raises(ScheduleError, match=r"1F1\.0 is missing on rank 1"):
            TYPED.remove("1F1").validate()

    def test_the_last_action_of_a_rank_stays(self):
        with pytest.raises(ScheduleError, match=r"1F0\.0 is all that rank 1 runs"):
            tp.Schedule.from_orders({0: "0F0", 1: "1F0"}, "[(1, [4])]").remove("1F0")


class TestDiff:
    def test_each_kind_of_change_is_a_line_and_a_row(self):
        other = TYPED.move("0B1", 0).remove("1F1").insert(1, 0, "1W0")
        diff = TYPED.diff(other)
        assert str(diff).splitlines() == [
            "name: typed here, typed, edited there",
            "rank 0: 0B1.0 moved from step 3 to step 0",
            "rank 1: 1W0.0 only there, at step 0",
            "rank 1: 1F1.0 only here, at step 2",
        ]
        assert repr(diff) == str(diff)
        assert diff.frame.columns.tolist() == ["action", "change", "rank", "step", "rank_there", "step_there"]
        assert diff.frame.astype(object).where(diff.frame.notna(), None).values.tolist() == [
            ["0B1.0", "moved", 0, 3, 0, 0],
            ["1W0.0", "only there", None, None, 1, 0],
            ["1F1.0", "only here", 1, 2, None, None],
        ]
        assert not diff.is_empty

    def test_the_same_orders_differ_in_nothing_but_a_name(self):
        diff = TYPED.diff(tp.Schedule(TYPED.orders, TYPED.slicing, "other"))
        assert diff.is_empty
        assert str(diff) == "name: typed here, other there\nthe same orders and slicing"
        assert str(TYPED.diff(TYPED)) == "the same orders and slicing"
        assert diff.frame.empty

    def test_another_slicing_is_a_difference(self):
        diff = TYPED.diff(tp.Schedule(TYPED.orders, tp.Slicing.parse("[(1, [5])] * 2"), "typed"))
        assert not diff.is_empty
        assert str(diff) == "slicing: [(1, [4])] * 2 here, [(1, [5])] * 2 there"

    def test_an_action_on_another_rank_has_moved_there(self):
        other = tp.Schedule.from_orders({0: "1F0 1B0 1F1 1B1", 1: "0F0 0F1 0B0 0B1"}, TYPED.slicing, "typed")
        assert "rank 0: 0F0.0 moved from step 0 to step 0 of rank 1" in str(TYPED.diff(other))
        assert len(TYPED.diff(other).changes) == 8

    def test_ranks_that_only_one_has_are_told_by_their_actions(self):
        longer = tp.Schedule((*TYPED.orders, (Action(2, Kind.F, 0),)), TYPED.slicing, "typed")
        assert str(TYPED.diff(longer)) == "rank 2: 2F0.0 only there, at step 0"
        assert str(longer.diff(TYPED)) == "rank 2: 2F0.0 only here, at step 0"

    def test_a_repeated_action_is_one_more(self):
        assert TYPED.diff(TYPED.insert(0, 4, "0F0")).changes == (Change(Action(0, Kind.F, 0), None, (0, 4)),)

    def test_what_is_no_schedule_is_refused(self):
        with pytest.raises(ScheduleError, match=r"diff\('typed'\): needs another Schedule"):
            TYPED.diff("typed")

    @given(schedules(), st.integers(0, 2**32))
    @PROPERTY
    def test_one_move_anywhere_is_one_change_and_back_again_none(self, drawn, seed):
        orders, slicing = drawn
        schedule = tp.Schedule.from_orders(dict(enumerate(orders)), slicing)
        rng = random.Random(seed)
        rank = rng.randrange(len(orders))
        step, target = rng.randrange(len(orders[rank])), rng.randrange(len(orders[rank]))
        moved = schedule.move(orders[rank][step], target)
        assert len(schedule.diff(moved).changes) == (step != target)
        assert moved.move(orders[rank][step], step).orders == schedule.orders

    @given(st.permutations(range(7)))
    @PROPERTY
    def test_the_changes_of_a_shuffled_order_are_as_few_as_moves_can_be(self, permutation):
        """The unmoved are a longest increasing subsequence, found here by trying all 128."""
        here = [tuple(Action(0, Kind.F, number) for number in range(7))]
        there = [tuple(Action(0, Kind.F, number) for number in permutation)]
        subsets = [[number for bit, number in enumerate(permutation) if chosen >> bit & 1] for chosen in range(128)]
        longest = max(len(kept) for kept in subsets if kept == sorted(kept))
        assert len(compare_orders(here, there)) == 7 - longest
