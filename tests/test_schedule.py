"""The schedule IR: actions as text, the families typed out, lowering, and what cannot run."""

import random
import re
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Stuck, inputs, times
from strategies import PROPERTY, schedules, slicings

import terapipe as tp
from terapipe.errors import ScheduleError
from terapipe.schedule import Action, Kind, lower

TWO_SLICES = "[(1, [2, 1])]"
TWO_WHOLE = "[(1, [2])] * 2"


def typed(diagram: str) -> list[list[str]]:
    """One line a rank, one column a unit of time, "." where the rank is idle."""
    return [[cell for cell in line.split() if cell != "."] for line in diagram.strip().splitlines()]


def as_text(schedule: tp.Schedule) -> list[list[str]]:
    return [[str(action) for action in order] for order in schedule.orders]


def orders_of(texts: list[list[str]]) -> dict[int, list[str]]:
    return dict(enumerate(texts))


class TestAction:
    @pytest.mark.parametrize("kind", list(Kind))
    def test_text_comes_back_for_every_kind(self, kind):
        for action in (Action(2, kind, 0, 3), Action(0, kind, 0), Action(95, kind, 511, 10)):
            assert Action.parse(str(action)) == action

    @given(st.integers(0, 10_000), st.sampled_from(list(Kind)), st.integers(0, 10_000), st.integers(0, 10_000))
    @PROPERTY
    def test_text_is_stage_kind_microbatch_slice(self, stage, kind, microbatch, place):
        text = f"{stage}{kind.value}{microbatch}.{place}"
        assert str(Action(stage, kind, microbatch, place)) == text
        assert Action.parse(text) == (stage, kind, microbatch, place)

    def test_a_text_without_slice_is_slice_0(self):
        assert Action.parse("2F0") == Action(2, Kind.F, 0, 0)
        assert str(Action.parse("2F0")) == "2F0.0"
        assert Action.parse(" 12RECV_B3.4 ") == Action(12, Kind.RECV_B, 3, 4)

    @pytest.mark.parametrize("kind", ["R", "OPT", "REDUCE"])
    def test_a_reserved_kind_is_refused_as_reserved(self, kind):
        with pytest.raises(ScheduleError, match=rf"'0{kind}0'.*{kind} is reserved.*F, B, I, W"):
            Action.parse(f"0{kind}0")

    @pytest.mark.parametrize(("kind", "nearest"), [("SENDF", "SEND_F"), ("RECV_G", "RECV_"), ("FF", "F")])
    def test_an_unknown_kind_is_refused_with_the_nearest(self, kind, nearest):
        with pytest.raises(ScheduleError, match=rf"'1{kind}0\.2'.*unknown kind of action '{kind}'. Did you mean '{nearest}"):
            Action.parse(f"1{kind}0.2")

    @pytest.mark.parametrize("text", ["", "F0", "0F", "0F0.", "0F0.0.0", "-1F0", "0F-1", "0f0", "0 F 0", "0F0,0", "F", "00"])
    def test_what_is_no_action_is_refused_quoting_it(self, text):
        with pytest.raises(ScheduleError, match=re.escape(repr(text))):
            Action.parse(text)


class TestFamilies:
    """Orders typed out by hand; the columns are the times at which they run when every action takes 1."""

    CASES: ClassVar = {
        ("gpipe", 1, "[(1, [4])] * 2"): """
            0F0.0 0F1.0 0B1.0 0B0.0
            """,
        ("gpipe", 2, "[(1, [4])] * 2"): """
            0F0.0 0F1.0 .     .     0B1.0 0B0.0
            .     1F0.0 1F1.0 1B1.0 1B0.0
            """,
        ("gpipe", 3, "[(2, [4])] * 3"): """
            0F0.0 0F1.0 0F2.0 .     .     .     .     0B2.0 0B1.0 0B0.0
            .     1F0.0 1F1.0 1F2.0 .     .     1B2.0 1B1.0 1B0.0
            .     .     2F0.0 2F1.0 2F2.0 2B2.0 2B1.0 2B0.0
            """,
        ("terapipe", 2, "[(1, [2, 1, 1])]"): """
            0F0.0 0F0.1 0F0.2 .     .     0B0.2 0B0.1 0B0.0
            .     1F0.0 1F0.1 1F0.2 1B0.2 1B0.1 1B0.0
            """,
        ("terapipe", 4, "[(1, [2, 2])]"): """
            0F0.0 0F0.1 .     .     .     .     .     .     0B0.1 0B0.0
            .     1F0.0 1F0.1 .     .     .     .     1B0.1 1B0.0
            .     .     2F0.0 2F0.1 .     .     2B0.1 2B0.0
            .     .     .     3F0.0 3F0.1 3B0.1 3B0.0
            """,
        ("terapipe", 2, "[(1, [3]), (1, [2, 1])]"): """
            0F0.0 0F1.0 0F1.1 .     .     0B1.1 0B1.0 0B0.0
            .     1F0.0 1F1.0 1F1.1 1B1.1 1B1.0 1B0.0
            """,
        ("1f1b", 1, "[(1, [4])] * 2"): """
            0F0.0 0B0.0 0F1.0 0B1.0
            """,
        ("1f1b", 2, "[(1, [4])] * 3"): """
            0F0.0 0F1.0 .     0B0.0 0F2.0 0B1.0 .     0B2.0
            .     1F0.0 1B0.0 1F1.0 1B1.0 1F2.0 1B2.0
            """,
        ("1f1b", 3, "[(1, [4])] * 3"): """
            0F0.0 0F1.0 0F2.0 .     .     0B0.0 .     0B1.0 .     0B2.0
            .     1F0.0 1F1.0 .     1B0.0 1F2.0 1B1.0 .     1B2.0
            .     .     2F0.0 2B0.0 2F1.0 2B1.0 2F2.0 2B2.0
            """,
        ("1f1b", 4, "[(1, [4])]"): """
            0F0.0 .     .     .     .     .     .     0B0.0
            .     1F0.0 .     .     .     .     1B0.0
            .     .     2F0.0 .     .     2B0.0
            .     .     .     3F0.0 3B0.0
            """,
        ("seq1f1b", 2, "[(1, [2, 1])] * 2"): """
            0F0.0 0F0.1 0F1.0 .     0B0.1 0F1.1 0B0.0 .     0B1.1 0B1.0
            .     1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0
            """,
        ("seq1f1b", 3, "[(1, [1, 1])] * 2"): """
            0F0.0 0F0.1 0F1.0 0F1.1 .     .     0B0.1 .     0B0.0 .     0B1.1 0B1.0
            .     1F0.0 1F0.1 1F1.0 .     1B0.1 1F1.1 1B0.0 .     1B1.1 1B1.0
            .     .     2F0.0 2F0.1 2B0.1 2F1.0 2B0.0 2F1.1 2B1.1 2B1.0
            """,
        ("seq1f1b", 2, "[(1, [2, 1, 1]), (1, [4])]"): """
            0F0.0 0F0.1 0F0.2 0F1.0 .     0B0.2 .     0B0.1 0B0.0 0B1.0
            .     1F0.0 1F0.1 1F0.2 1B0.2 1F1.0 1B0.1 1B0.0 1B1.0
            """,
    }  # fmt: skip

    @pytest.mark.parametrize(("name", "n_ranks", "slicing"), CASES)
    def test_orders_are_those_typed_out(self, name, n_ranks, slicing):
        schedule = tp.build_schedule(name, n_ranks, slicing)
        assert as_text(schedule.validate()) == typed(self.CASES[name, n_ranks, slicing])
        assert schedule.name == name
        assert schedule.stage_to_rank == tuple(range(n_ranks))
        assert (schedule.n_ranks, schedule.n_stages, schedule.chunks_per_rank) == (n_ranks, n_ranks, 1)

    @pytest.mark.parametrize(("name", "n_ranks", "slicing"), CASES)
    def test_the_diagonal_typed_out_is_when_each_action_starts(self, name, n_ranks, slicing):
        diagram = self.CASES[name, n_ranks, slicing]
        starts = times(typed(diagram), lambda *action: 1.0)
        columns = [line.split() for line in diagram.strip().splitlines()]
        assert {text: start for text, (start, _) in starts.items()} == {
            cell: column for line in columns for column, cell in enumerate(line) if cell != "."
        }

    @pytest.mark.parametrize("n_ranks", [1, 2, 4, 8])
    @pytest.mark.parametrize("n_microbatches", [1, 2, 8])
    def test_every_size_is_complete_and_without_deadlock(self, n_ranks, n_microbatches):  # S7: fewer microbatches than ranks
        for name in ("gpipe", "terapipe", "1f1b", "seq1f1b", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "looped-bfs"):
            tp.build_schedule(name, n_ranks, tp.uniform_slicing(8, 1, n_microbatches)).validate()
        for name in ("terapipe", "seq1f1b", "seq1f1b-zb", "looped-bfs", "forward-only"):
            tp.build_schedule(name, n_ranks, tp.uniform_slicing(8, 3, n_microbatches)).validate()

    def test_1f1b_warms_up_with_p_minus_r_minus_1_forwards(self):
        schedule = tp.build_schedule("1f1b", 4, tp.uniform_slicing(8, 1, 8))
        for rank, order in enumerate(schedule.orders):
            assert [action.kind for action in order].index(Kind.B) == 4 - rank - 1 + 1

    @pytest.mark.parametrize("n_ranks", [1, 2, 4, 8])
    @pytest.mark.parametrize("n_microbatches", [1, 3, 8, 20])
    def test_seq1f1b_of_whole_microbatches_is_1f1b(self, n_ranks, n_microbatches):
        slicing = tp.uniform_slicing(8, 1, n_microbatches)
        assert tp.build_schedule("seq1f1b", n_ranks, slicing).orders == tp.build_schedule("1f1b", n_ranks, slicing).orders

    def test_seq1f1b_of_one_microbatch_is_terapipe(self):
        slicing = tp.uniform_slicing(8, 5)
        assert tp.build_schedule("seq1f1b", 3, slicing).orders == tp.build_schedule("terapipe", 3, slicing).orders

    def test_seq1f1b_warms_up_with_p_minus_r_minus_2_plus_k_forwards(self):
        n_ranks, k = 4, 3
        schedule = tp.build_schedule("seq1f1b", n_ranks, tp.uniform_slicing(8, k, 8))
        for rank, order in enumerate(schedule.orders):
            first_backward = [action.kind for action in order].index(Kind.B)
            assert first_backward == n_ranks - rank - 2 + k + 1  # the forward of the first pair stands before it

    @given(slicings(max_tokens=30, max_microbatches=6, max_slices=7), st.integers(1, 9))
    @settings(PROPERTY, max_examples=200)
    def test_seq1f1b_of_unequal_counts_is_complete_and_never_deadlocks(self, slicing, n_ranks):
        schedule = tp.build_schedule("seq1f1b", n_ranks, slicing).validate()
        assert len(times(as_text(schedule), lambda *action: 1.0)) == 2 * n_ranks * len(slicing.units)

    def test_terapipe_of_whole_microbatches_is_gpipe(self):
        slicing = tp.uniform_slicing(8, 1, 5)
        assert tp.build_schedule("terapipe", 3, slicing).orders == tp.build_schedule("gpipe", 3, slicing).orders

    @pytest.mark.parametrize(("name", "nearest"), [("gpipe", "terapipe"), ("1f1b", "seq1f1b")])
    def test_families_of_whole_microbatches_refuse_slices_and_name_the_nearest_that_takes_them(self, name, nearest):
        with pytest.raises(ScheduleError, match=rf"^{name} runs whole microbatches.*up to 2 slices.*Use '{nearest}'"):
            tp.build_schedule(name, 2, "[(1, [4]), (1, [2, 2])]")

    @pytest.mark.parametrize(
        ("given_name", "nearest"), [("gpip", "gpipe"), ("TeraPipe", "terapipe"), ("1F1B", "1f1b"), ("tera-pipe", "terapipe")]
    )
    def test_an_unknown_family_is_refused_with_the_nearest(self, given_name, nearest):
        with pytest.raises(ScheduleError, match=rf"unknown schedule '{given_name}'. Did you mean '{nearest}'\?"):
            tp.build_schedule(given_name, 2, TWO_WHOLE)

    def test_sizes_that_no_family_can_run_are_refused(self):
        with pytest.raises(ScheduleError, match="n_ranks=0"):
            tp.build_schedule("gpipe", 0, TWO_WHOLE)
        with pytest.raises(ScheduleError, match="chunks_per_rank=2"):
            tp.build_schedule("gpipe", 2, TWO_WHOLE, chunks_per_rank=2)


class TestSeq1F1B:
    """Closed forms and known values of Seq1F1B (arXiv 2406.03488), by simulation."""

    @staticmethod
    def simulate(name: str, n_ranks: int, n_microbatches: int, k: int, t_f: float, t_b: float, share: float = 0.0):
        """Equal slices; `share` of a microbatch's work is causal attention, ∝ l·(c + l/2)."""
        slicing = tp.uniform_slicing(84, k, n_microbatches)
        seq = slicing.seq_tokens

        def work(l, c, b):
            return (1 - share) * l / seq + share * 2 * l * (c + l / 2) / seq**2

        cost = tp.CallableCost(lambda *unit: t_f * work(*unit), lambda *unit: t_b * work(*unit))
        return tp.simulate(tp.build_schedule(name, n_ranks, slicing), cost)

    @pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 8])
    @pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
    def test_the_bubble_of_equal_slices_is_p_minus_1_over_k_microbatches(self, n_ranks, k):
        for n_microbatches in (1, 2, 3, 8, 16):
            for t_f, t_b in ((1.0, 2.0), (0.7, 0.7), (3.1, 1.3)):
                timeline = self.simulate("seq1f1b", n_ranks, n_microbatches, k, t_f, t_b)
                bubble = timeline.makespan_ms - n_microbatches * (t_f + t_b)
                assert bubble == pytest.approx((n_ranks - 1) * (t_f + t_b) / k, rel=1e-9, abs=1e-9)

    @pytest.mark.parametrize("n_ranks", [1, 2, 4, 8])
    @pytest.mark.parametrize("k", [1, 2, 4, 7])
    def test_rank_r_holds_at_most_p_minus_r_minus_1_plus_k_units(self, n_ranks, k):
        for n_microbatches in (1, 2, 8):
            peaks = self.simulate("seq1f1b", n_ranks, n_microbatches, k, 1.0, 2.0).peak_in_flight()
            assert peaks.tolist() == [min(n_ranks - rank - 1 + k, n_microbatches * k) for rank in range(n_ranks)]

    def test_8_ranks_16_microbatches_4_slices_waste_an_eleventh_where_1f1b_wastes_nearly_half(self):
        sliced, whole = self.simulate("seq1f1b", 8, 16, 4, 1.0, 2.0), self.simulate("1f1b", 8, 16, 1, 1.0, 2.0)
        assert sliced.bubble_overhead == pytest.approx(7 / (16 * 4)) == pytest.approx(0.109375)
        assert whole.bubble_overhead == pytest.approx(7 / 16)
        assert sliced.peak_in_flight()[0] == 11  # units, four to a microbatch: 2.75 microbatches
        assert whole.peak_in_flight()[0] == 8

    @pytest.mark.parametrize(("share", "fraction"), [(0, 0.1795), (0.25, 0.298), (0.5, 0.386), (0.75, 0.455)])
    def test_equal_slices_are_a_trap_under_causal_attention(self, share, fraction):
        timeline = self.simulate("seq1f1b", 8, 8, 4, 1.0, 2.0, share)
        assert timeline.bubble_fraction == pytest.approx(fraction, abs=5e-4)
        assert self.simulate("1f1b", 8, 8, 1, 1.0, 2.0, share).bubble_fraction == pytest.approx(7 / 15)


class TestText:
    def test_orders_typed_by_hand_read_as_lists_or_as_one_text(self):
        as_lists = tp.Schedule.from_orders({0: ["0F0", "0F0.1", "0B0.1", Action(0, Kind.B, 0)]}, TWO_SLICES)
        as_one_text = tp.Schedule.from_orders({0: "0F0.0, 0F0.1  0B0.1 0B0.0"}, tp.Slicing.parse(TWO_SLICES))
        assert as_lists.validate() == as_one_text.validate()
        assert as_lists.name == "custom"
        assert as_lists.slicing == tp.Slicing.parse(TWO_SLICES)

    @given(schedules())
    @PROPERTY
    def test_any_schedule_comes_back_from_csv(self, tmp_path_factory, drawn):
        orders, slicing = drawn
        schedule = tp.Schedule.from_orders(orders_of(orders), slicing, "mine")
        path = schedule.to_csv(tmp_path_factory.mktemp("csv") / "schedule.csv")
        assert tp.Schedule.from_csv(path, str(slicing), "mine") == schedule

    def test_csv_is_one_row_a_rank_one_cell_an_action(self, tmp_path):
        path = tp.build_schedule("terapipe", 2, TWO_SLICES).to_csv(tmp_path / "schedule.csv")
        assert path.read_text().split() == ["0F0.0,0F0.1,0B0.1,0B0.0", "1F0.0,1F0.1,1B0.1,1B0.0"]

    def test_blank_cells_of_a_csv_are_idle_steps(self, tmp_path):
        path = tmp_path / "typed.csv"
        path.write_text("0F0,,,0B0\n,1F0,1B0,\n")
        assert tp.Schedule.from_csv(str(path), "[(1, [4])]").orders == tp.build_schedule("gpipe", 2, "[(1, [4])]").orders

    def test_a_blank_line_at_the_end_of_a_csv_is_no_rank(self, tmp_path):
        path = tmp_path / "typed.csv"
        path.write_text("0F0,0B0\n\n")
        assert tp.Schedule.from_csv(path, "[(1, [4])]").n_ranks == 1

    def test_an_empty_csv_is_refused_by_name(self, tmp_path):
        path = tmp_path / "empty.csv"
        path.write_text("")
        with pytest.raises(ScheduleError, match=r"empty\.csv is empty"):
            tp.Schedule.from_csv(path, "[(1, [4])]")

    def test_printing_is_the_step_by_rank_grid(self):
        assert str(tp.build_schedule("gpipe", 2, "[(1, [4])]")).splitlines() == [
            "step  rank 0  rank 1",
            "   0  0F0.0   1F0.0",
            "   1  0B0.0   1B0.0",
        ]

    @pytest.mark.parametrize("orders", [{}, {1: ["0F0"]}, {0: ["0F0"], 2: ["1F0"]}, {-1: ["0F0"], 0: ["1F0"]}])
    def test_ranks_that_are_not_0_to_n_minus_1_are_refused(self, orders):
        with pytest.raises(ScheduleError, match=re.escape(f"orders for ranks {sorted(orders)}")):
            tp.Schedule.from_orders(orders, "[(1, [4])]")

    @pytest.mark.parametrize("kind", ["SEND_F", "RECV_F", "SEND_B", "RECV_B"])
    def test_a_transfer_in_a_compute_order_is_refused_with_its_place(self, kind):
        with pytest.raises(ScheduleError, match=rf"rank 1, step 1: 1{kind}0\.0 is a transfer"):
            tp.Schedule.from_orders({0: ["0F0"], 1: ["1F0", f"1{kind}0"]}, "[(1, [4])]")

    def test_a_kind_given_as_plain_text_is_that_kind(self):
        schedule = tp.Schedule.from_orders({0: [Action(0, "F", 0)], 1: [Action(1, "F", 0)]}, "[(1, [4])]")
        assert as_text(schedule) == [["0F0.0"], ["1F0.0"]]
        assert [[str(action) for action in order] for order in lower(schedule)] == [
            ["0F0.0", "0SEND_F0.0"],
            ["1RECV_F0.0", "1F0.0"],
        ]

    @pytest.mark.parametrize("entry", [None, ("0", "F", 0)])
    def test_an_entry_that_is_neither_text_nor_action_is_refused_with_its_place(self, entry):
        with pytest.raises(ScheduleError, match="rank 0, step 1"):
            tp.Schedule.from_orders({0: ["0F0", entry]}, "[(1, [4])]")


class TestLowering:
    def test_a_pipeline_of_3_typed_out(self):
        lowered = lower(tp.build_schedule("terapipe", 3, TWO_SLICES))
        assert [" ".join(str(action) for action in order) for order in lowered] == [
            "0F0.0 0SEND_F0.0 0F0.1 0SEND_F0.1 0RECV_B0.1 0B0.1 0RECV_B0.0 0B0.0",
            "1RECV_F0.0 1F0.0 1SEND_F0.0 1RECV_F0.1 1F0.1 1SEND_F0.1 "
            "1RECV_B0.1 1B0.1 1SEND_B0.1 1RECV_B0.0 1B0.0 1SEND_B0.0",
            "2RECV_F0.0 2F0.0 2RECV_F0.1 2F0.1 2B0.1 2SEND_B0.1 2B0.0 2SEND_B0.0",
        ]  # fmt: skip

    def test_stages_on_one_rank_hand_over_without_a_transfer(self):
        schedule = tp.Schedule.from_orders({0: "0F0 3F0 3I0 0I0 3W0 0W0", 1: "1F0 2F0 2B0 1I0 1W0"}, "[(1, [4])]").validate()
        assert [" ".join(str(action) for action in order) for order in lower(schedule)] == [
            "0F0.0 0SEND_F0.0 3RECV_F0.0 3F0.0 3I0.0 3SEND_B0.0 0RECV_B0.0 0I0.0 3W0.0 0W0.0",
            "1RECV_F0.0 1F0.0 2F0.0 2SEND_F0.0 2RECV_B0.0 2B0.0 1I0.0 1SEND_B0.0 1W0.0",
        ]
        assert schedule.stage_to_rank == (0, 1, 1, 0)
        assert schedule.chunks_per_rank == 2

    @given(schedules())
    @PROPERTY
    def test_every_send_has_one_receive_next_to_the_actions_it_joins(self, drawn):
        orders, slicing = drawn
        schedule = tp.Schedule.from_orders(orders_of(orders), slicing).validate()
        lowered = lower(schedule)
        homes, sends, receives = schedule.stage_to_rank, [], []
        for rank, order in enumerate(lowered):
            assert [str(action) for action in order if action.kind in "FBIW"] == orders[rank]
            for place, action in enumerate(order):
                assert homes[action.stage] == rank
                forward = action.kind.endswith("_F")
                if action.kind.startswith("SEND"):
                    made = order[place - 1]
                    assert (made.kind is Kind.F) if forward else (made.kind in "BI")
                    target = action.stage + (1 if forward else -1)
                    sends.append((forward, target, *action[2:]))
                elif action.kind.startswith("RECV"):
                    made = order[place + 1]
                    assert (made.kind is Kind.F) if forward else (made.kind in "BI")
                    receives.append((forward, *action[:1], *action[2:]))
                else:
                    continue
                assert (made.stage, made.microbatch, made.slice) == (action.stage, action.microbatch, action.slice)
        assert sorted(sends) == sorted(receives)
        assert len(set(sends)) == len(sends)
        assert len(sends) == 2 * len(slicing.units) * sum(a != b for a, b in pairwise(homes))


def swap_two(orders: list[list[str]], rng: random.Random) -> None:
    """Swap two actions of one rank, in place."""
    order = rng.choice(orders)
    a, b = rng.randrange(len(order)), rng.randrange(len(order))
    order[a], order[b] = order[b], order[a]


class TestValidation:
    """Every refusal quotes the action and marks its cell in the step × rank grid by > and <."""

    @staticmethod
    def refusal(orders, slicing) -> str:
        with pytest.raises(ScheduleError) as refused:
            tp.Schedule.from_orders(orders, slicing).validate()
        return str(refused.value)

    @pytest.mark.parametrize(
        ("orders", "slicing", "said", "marked"),
        [
            # missing
            ({0: "0F0 0F0.1 0B0.1"}, TWO_SLICES, "0B0.0 is missing on rank 0", [">nothing<"]),
            ({0: "0F0 0B0.1 0B0"}, TWO_SLICES, "0F0.1 is missing on rank 0", [">nothing<"]),
            ({0: "0F0 0F1 0B0 0B1", 1: "1F0 1F1 1B1"}, TWO_WHOLE, "1B0.0 is missing on rank 1", [">nothing<"]),
            ({0: "0F0 0I0"}, "[(1, [4])]", "0W0.0 is missing on rank 0", [">nothing<"]),
            ({0: "0F0 0W0"}, "[(1, [4])]", "0I0.0 is missing on rank 0", [">nothing<"]),
            ({0: "0F0 0B0", 1: "1F0"}, "[(1, [4])]", "1B0.0 is missing on rank 1", [">nothing<"]),
            # twice
            ({0: "0F0 0F0 0B0"}, "[(1, [4])]", "0F0.0 appears twice, at steps 0 and 1", [">0F0.0<"] * 2),
            ({0: "0F0 0B0", 1: "1F0 1B0 1B0"}, "[(1, [4])]", "1B0.0 appears twice, at steps 1 and 2", [">1B0.0<"] * 2),
            # wrong order on one rank
            ({0: "0F0.1 0F0 0B0.1 0B0"}, TWO_SLICES, "0F0.1 at step 0 needs 0F0.0, which stands after it", [">0F0.1<"]),
            ({0: "0F0 0F0.1 0B0 0B0.1"}, TWO_SLICES, "0B0.0 at step 2 needs 0B0.1, which stands after it", [">0B0.0<"]),
            ({0: "0B0 0F0"}, "[(1, [4])]", "0B0.0 at step 0 needs 0F0.0, which stands after it at step 1", [">0B0.0<"]),
            ({0: "0F0 0W0 0I0"}, "[(1, [4])]", "0W0.0 at step 1 needs 0I0.0", [">0W0.0<"]),
            ({0: "1F0 0F0 1B0 0B0"}, "[(1, [4])]", "1F0.0 at step 0 needs 0F0.0", [">1F0.0<"]),
            ({0: "0F0 1F0 0B0 1B0"}, "[(1, [4])]", "0B0.0 at step 2 needs 1B0.0", [">0B0.0<"]),
            # names no slice
            ({0: "0F0 0F2 0B0"}, TWO_WHOLE, "0F2.0 (rank 0, step 1) does not exist", [">0F2.0<"]),
            ({0: "0F0 0F0.2 0B0"}, TWO_SLICES, "0F0.2 (rank 0, step 1) does not exist", [">0F0.2<"]),
            ({0: "0F0 0F1.1 0B0"}, "[(1, [1, 1]), (1, [2])]", "microbatch 1 of [(1, [1, 1]), (1, [2])] has", [">0F1.1<"]),
            # whole and split backward
            ({0: "0F0 0I0 0B0 0W0"}, "[(1, [4])]", "either B or I and W, not both", [">0B0.0<", ">0I0.0<", ">0W0.0<"]),
            # a stage in two places, or in none
            ({0: "0F0 0B0", 1: "0F1 0B1"}, TWO_WHOLE, "stage 0 is on rank 0 and, at step 0, on rank 1 (0F1.0)", [">0F1.0<"]),
        ],
    )  # fmt: skip
    def test_a_fault_is_named_and_its_cell_marked(self, orders, slicing, said, marked):
        message = self.refusal(orders, slicing)
        assert said in message
        assert re.search(r"^step +rank 0", message, re.MULTILINE), message
        assert sorted(re.findall(r">[^ ]+<", message)) == sorted(marked)

    def test_a_stage_that_no_rank_runs_is_named(self):
        message = self.refusal({0: "0F0 0B0", 1: "2F0 2B0"}, "[(1, [4])]")
        assert message.startswith("no rank runs stage 1 of stages 0…2, which 2F0.0 (rank 1, step 0) asks for.")
        assert re.findall(r">[^ ]+<", message) == [">2F0.0<"]

    @pytest.mark.parametrize("action", ["1000000001F0", "0F99999999999999999999", "0F0.1000000001"])
    def test_a_number_too_large_for_any_schedule_is_refused_with_its_place(self, action):
        with pytest.raises(ScheduleError, match=rf"rank 0, step 1: {re.escape(action)}.* has a number beyond 1,000,000,000"):
            tp.Schedule.from_orders({0: ["0F0", action]}, TWO_SLICES)

    @pytest.mark.parametrize("orders", [{0: ""}, {0: "0F0 0B0", 1: ""}, {0: "", 1: "0F0 0B0"}])
    def test_a_rank_without_actions_is_refused_by_number(self, orders):
        idle = next(rank for rank, order in orders.items() if not order)
        assert f"rank {idle}" in self.refusal(orders, "[(1, [4])]")

    @pytest.mark.parametrize("action", [Action(-1, Kind.F, 0, 0), Action(0, Kind.F, -1, 0), Action(0, Kind.F, 0, -1)])
    def test_a_negative_number_in_an_action_is_refused_not_counted_from_the_end(self, action):
        message = self.refusal({0: [Action(0, Kind.F, 0, 0), action]}, TWO_SLICES)
        assert str(action) in message.splitlines()[0]

    def test_a_deadlock_names_its_cycle_of_2_and_marks_both_cells(self):
        message = self.refusal({0: "0F0 0B0 0F1 0B1", 1: "1F0 1F1 1B0 1B1"}, TWO_WHOLE)
        assert "deadlock: rank 0 waits at 0B0.0 for 1B0.0; rank 1 waits at 1F1.0 for 0F1.0." in message
        assert message.splitlines()[-5:] == [
            "step  rank 0  rank 1",
            "   0  0F0.0   1F0.0",
            "   1 >0B0.0< >1F1.0<",
            "   2  0F1.0   1B0.0",
            "   3  0B1.0   1B1.0",
        ]

    def test_a_deadlock_names_its_cycle_of_3_and_leaves_out_who_waits_for_it(self):
        orders = {0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1", 2: "2F0 2F1 2B0 2B1", 3: "3F0 3F1 3B0 3B1"}
        message = self.refusal(orders, TWO_WHOLE)
        assert message.startswith("deadlock: ")
        assert "rank 1 waits at 1B0.0 for 2B0.0" in message
        assert "rank 2 waits at 2F1.0 for 1F1.0" in message
        assert "rank 0 waits" not in message
        assert "rank 3 waits" not in message
        assert sorted(re.findall(r">[^ ]+<", message)) == [">1B0.0<", ">2F1.0<"]

    def test_a_deadlock_deep_in_a_long_schedule_shows_its_part_of_the_grid(self):
        n = 100
        fine = {rank: [f"{rank}{kind}{m}" for m in range(n) for kind in "FB"] for rank in range(2)}
        fine[1][140:144] = ["1F70", "1F71", "1B70", "1B71"]
        message = self.refusal(fine, f"[(1, [4])] * {n}")
        assert "deadlock" in message
        assert len(message.splitlines()) < 20
        assert ">1F71.0<" in message
        assert ">0B70.0<" in message

    def test_a_schedule_without_any_backward_is_complete(self):
        tp.Schedule.from_orders({0: "0F0 0F0.1", 1: "1F0 1F0.1"}, TWO_SLICES).validate()

    @given(schedules())
    @settings(PROPERTY, max_examples=150)
    def test_any_topological_order_over_any_placement_is_accepted(self, drawn):
        orders, slicing = drawn
        schedule = tp.Schedule.from_orders(orders_of(orders), slicing)
        assert schedule.validate() is schedule
        homes = {int(re.match(r"\d+", text)[0]): rank for rank, order in enumerate(orders) for text in order}
        assert schedule.stage_to_rank == tuple(homes[stage] for stage in range(len(homes)))

    @given(schedules(), st.integers(0, 2**32))
    @settings(PROPERTY, max_examples=150)
    def test_one_action_removed_or_repeated_anywhere_is_refused(self, drawn, seed):
        orders, slicing = drawn
        rng = random.Random(seed)
        order = rng.choice(orders)
        text = rng.choice(order)
        if rng.random() < 0.5:
            order.insert(rng.randint(0, len(order)), text)
            said = f"{text} appears twice"
        else:
            order.remove(text)
            said = "missing"
        if not any(kind in text for order in orders for text in order for kind in "BIW"):
            return  # that was the only backward: what is left is a forward-only schedule
        message = self.refusal(orders_of(orders), slicing)
        assert said in message

    @given(schedules(), st.integers(0, 2**32))
    @settings(PROPERTY, max_examples=150)
    def test_a_shuffled_order_is_accepted_exactly_if_the_reference_can_run_it(self, drawn, seed):
        orders, slicing = drawn
        rng = random.Random(seed)
        for _ in range(rng.randint(1, 2)):
            swap_two(orders, rng)
        try:
            times(orders, lambda *action: 1.0)
        except Stuck:
            message = self.refusal(orders_of(orders), slicing)
            assert "wrong order" in message or "deadlock" in message
        else:
            tp.Schedule.from_orders(orders_of(orders), slicing).validate()

    @given(schedules(), st.integers(0, 2**32))
    @settings(PROPERTY, max_examples=100)
    def test_every_deadlock_named_is_a_cycle_of_dependencies_and_orders(self, drawn, seed):
        orders, slicing = drawn
        rng = random.Random(seed)
        swap_two(orders, rng)
        try:
            tp.Schedule.from_orders(orders_of(orders), slicing).validate()
        except ScheduleError as refused:
            waits = re.findall(r"rank (\d+) waits at (\S+) for (\S+?)[;.](?: |$)", str(refused))
            if "deadlock" not in str(refused):
                return
            assert len(waits) >= 2
            for (rank, waiting, needed), (next_rank, blocked, _) in zip(waits, [*waits[1:], waits[0]], strict=True):
                assert needed in inputs(waiting)
                assert waiting in orders[int(rank)]
                behind = orders[int(next_rank)]
                assert behind.index(blocked) <= behind.index(needed)
