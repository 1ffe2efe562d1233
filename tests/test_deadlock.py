"""What is said of orders that cannot run, typed out: the shortest cycle of waits, and the move that repairs it.

Random deadlocks, held against an exhaustive search, are in test_random_schedules.py.
"""

import pickle

import pytest

import terapipe as tp
from terapipe.errors import DeadlockError, ScheduleError

TWO_WHOLE = "[(1, [2])] * 2"


def refusal(orders: dict[int, str], slicing: str = TWO_WHOLE) -> DeadlockError:
    with pytest.raises(DeadlockError) as refused:
        tp.Schedule.from_orders(orders, slicing).validate()
    return refused.value


class TestCycle:
    def test_it_is_data_beside_the_text(self):
        error = refusal({0: "0F0 0B0 0F1 0B1", 1: "1F0 1F1 1B0 1B1"})
        assert error.cycle == ((0, "0B0.0", "1B0.0"), (1, "1F1.0", "0F1.0"))
        assert isinstance(error, ScheduleError)

    def test_the_cycle_named_is_the_shortest_though_ranks_stop_at_a_longer_one_before_it(self):
        """All three ranks stop in the cycle of microbatches 0 and 1; that of 2 and 3, on ranks 0 and 1, stands behind it."""
        orders = {
            0: "0F0 3F0 0F1 3B0 0B0 3F1 3B1 0B1  0F2 3F2 3B2 0B2 0F3 3F3 3B3 0B3",
            1: "1F1 1F0 1B0 1B1                  1F2 1F3 1B2 1B3",
            2: "2F0 2F1 2B0 2B1                  2F2 2B2 2F3 2B3",
        }
        error = refusal(orders, "[(1, [2])] * 4")
        assert error.cycle == ((1, "1F3.0", "0F3.0"), (0, "0B2.0", "1B2.0"))

    def test_a_wrong_order_is_a_cycle_of_one(self):
        error = refusal({0: "0F0 0B1 0F1 0B0", 1: "1F0 1F1 1B0 1B1"})
        assert error.cycle == ((0, "0B1.0", "0F1.0"),)
        assert str(error).startswith("wrong order on rank 0: 0B1.0 at step 1 needs 0F1.0, which stands after it at step 2. ")

    def test_a_cycle_of_three_ranks_is_followed_all_round(self):
        orders = {0: "0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1", 1: "1F1 1F0 1B0 1B1", 2: "2F0 2F1 2B0 2B1"}
        tp.Schedule.from_orders(orders, TWO_WHOLE).validate()
        orders[0] = "0F0 3F0 0F1 3B0 0B0 3F1 3B1 0B1"
        error = refusal(orders)
        assert error.cycle == ((1, "1F1.0", "0F1.0"), (0, "3F0.0", "2F0.0"), (2, "2F0.0", "1F0.0"))
        assert error.repair == ("3F0.0", 2)  # as far as 0F1 to step 1 or either of 1F0 and 1F1: the first of them

    def test_it_survives_a_pickle(self):
        error = refusal({0: "0F0 0B0 0F1 0B1", 1: "1F0 1F1 1B0 1B1"})
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.cycle, copy.repair) == (str(error), error.cycle, error.repair)


class TestRepair:
    def test_the_shortest_move_is_named_and_applies_as_it_stands(self):
        orders = {0: "0F0 0B0 0F1 0B1", 1: "1F0 1F1 1B0 1B1"}
        error = refusal(orders)
        assert error.repair == ("0B0.0", 2)
        assert ". Moving 0B0.0 to step 2 of rank 0 repairs it.\n" in str(error)
        fixed = tp.Schedule.from_orders(orders, TWO_WHOLE).move(*error.repair).validate()
        assert " ".join(map(str, fixed.orders[0])) == "0F0.0 0F1.0 0B0.0 0B1.0"

    def test_a_move_that_rights_the_rank_but_not_the_schedule_is_passed_over(self):
        """0F0 to step 0 is shorter and leaves a deadlock with rank 1."""
        error = refusal({0: "0B0 0F0 0F1 0B1", 1: "1F0 1F1 1B0 1B1"})
        assert error.cycle == ((0, "0B0.0", "0F0.0"),)
        assert error.repair == ("0B0.0", 2)

    def test_a_wrong_order_that_is_not_the_only_fault_has_none(self):
        error = refusal({0: "0B0 0F0 0B1 0F1", 1: "1F0 1F1 1B0 1B1"})
        assert error.repair is None
        assert "No move of a single action repairs it." in str(error)

    def test_two_deadlocks_have_none(self):
        one = {0: "0F0 0B0 0F1 0B1 ", 1: "1F0 1F1 1B0 1B1 "}
        two = {rank: text + text.replace("0 ", "2 ").replace("1 ", "3 ") for rank, text in one.items()}
        error = refusal(two, "[(1, [2])] * 4")
        assert error.cycle == ((0, "0B0.0", "1B0.0"), (1, "1F1.0", "0F1.0"))
        assert error.repair is None

    def test_a_long_schedule_is_explained_too(self):
        schedule = tp.build_schedule("seq1f1b", 4, tp.uniform_slicing(8, 4, 250))
        moved = schedule.move("2F200.1", 3)
        with pytest.raises(DeadlockError) as refused:
            moved.validate()
        assert refused.value.repair[0] == "2F200.1"
        moved.move(*refused.value.repair).validate()
        assert len(str(refused.value).splitlines()) < 60
