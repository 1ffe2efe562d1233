"""Schedules travel to torch.distributed.pipelining and back as its CSV, held against torch's own reader and writer.

torch's reader and tables are private, so a torch without them skips those tests. Its table of '1F1B' is
left out, as it numbers the last rank's forwards from 1.
"""

import csv
import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import PROPERTY, random_homes, random_orders

import terapipe as tp
from terapipe.errors import ScheduleError

try:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
except ImportError:
    _Action = None

needs_torch = pytest.mark.skipif(_Action is None, reason="this torch has other private names")
TABLES = ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def runtime(schedule: tp.Schedule) -> Any:
    """torch's runtime for as many ranks, stages and microbatches, without processes."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, schedule.n_ranks, schedule.n_stages, None
    return _PipelineScheduleRuntime([stage] * schedule.chunks_per_rank, schedule.slicing.n_microbatches)


def table(name: str, n_ranks: int, n_microbatches: int) -> list[list[Any]]:
    """torch's own operation table: a row a rank, None where it is idle."""
    return get_schedule_ops(name, n_ranks, n_microbatches, None if name == "GPipe" else 2)


def dumped(ops: list[list[Any]], path: Path) -> Path:
    """Written as torch's `_dump_csv` does."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(ops)
    return path


def assert_same(orders: Any, ops: Any) -> None:
    """Action by action, torch's idle steps left out."""
    for order, row in zip(orders, ops, strict=True):
        for action, other in zip(order, [each for each in row if each is not None], strict=True):
            assert (action.stage, action.kind.value, action.microbatch, action.slice) == (
                other.stage_index,
                other.computation_type.value,
                other.microbatch_index,
                0,
            )


class TestWriting:
    def test_cells_name_stage_kind_and_microbatch_and_a_row_is_a_rank(self, tmp_path):
        schedule = tp.Schedule.from_orders({0: "0F0 0F1 0B0 0I1 0W1", 1: "1F0 1B0 1F1 1B1"}, "[(2, [8])] * 2")
        path = schedule.to_torch_csv(tmp_path / "schedule.csv")
        assert path.read_text().split() == ["0F0,0F1,0B0,0I1,0W1", "1F0,1B0,1F1,1B1"]

    def test_slices_are_refused_with_the_whole_microbatches_to_use(self, tmp_path):
        schedule = tp.build_schedule("seq1f1b", 2, "[(1, [5, 3]), (2, [8])]")
        with pytest.raises(
            ScheduleError, match=r"whole microbatches only.*Build the schedule for \[\(1, \[8\]\), \(2, \[8\]\)\]"
        ):
            schedule.to_torch_csv(tmp_path / "schedule.csv")
        assert not (tmp_path / "schedule.csv").exists()

    def test_a_schedule_that_cannot_run_does_not_travel(self, tmp_path):
        with pytest.raises(ScheduleError, match=r"0B0\.0 is missing"):
            tp.Schedule.from_orders({0: "0F0", 1: "1F0 1B0"}, "[(1, [8])]").to_torch_csv(tmp_path / "schedule.csv")

    @needs_torch
    def test_torch_takes_a_slice_for_a_whole_microbatch_which_is_why_none_is_written(self):
        assert str(_Action.from_str("2F0.3")) == "2F0"


class TestReading:
    def test_the_tokens_of_a_sequence_make_as_many_whole_microbatches_as_the_file_names(self, tmp_path):
        path = tmp_path / "torch.csv"
        path.write_text("0F0,0F1,0F2,,,0B0,0B1,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2,\n")
        schedule = tp.Schedule.from_torch_csv(path, seq_tokens=16)
        assert schedule.validate().slicing == tp.uniform_slicing(16, 1, 3)
        assert [len(order) for order in schedule.orders] == [6, 6]
        assert tp.Schedule.from_torch_csv(path, "[(2, [16])] * 3", name="mine").name == "mine"

    def test_what_follows_from_the_order_is_left_out_and_an_overlap_is_its_two_actions(self, tmp_path):
        path = tmp_path / "lowered.csv"
        path.write_text("0UNSHARD,0F0,0SEND_F0,0F1,0RECV_B0,(0I0;0F2)OVERLAP_F_B,0SEND_B0,0REDUCE_GRAD,0RESHARD\n")
        orders = tp.Schedule.from_torch_csv(path, seq_tokens=4).orders
        assert [str(action) for action in orders[0]] == ["0F0.0", "0F1.0", "0I0.0", "0F2.0"]

    @pytest.mark.parametrize(
        "cell", ["0F0.1", "F0", "0F", "0X0", "0F0x", "(0F0;0SEND_F1)OVERLAP_F_B", "0OVERLAP_F_B", "0SEND_F"]
    )
    def test_a_cell_that_is_no_action_of_torchs_is_refused_with_its_place(self, cell, tmp_path):
        path = tmp_path / "torch.csv"
        path.write_text(f"0F0,0B0\n1F0,{cell}\n")
        with pytest.raises(ScheduleError, match=re.escape(f"rank 1, cell 1: {cell!r} is no action of torch's")):
            tp.Schedule.from_torch_csv(path, seq_tokens=4)

    @pytest.mark.parametrize("given_lengths", [{}, {"slicing": "[(1, [4])]", "seq_tokens": 4}])
    def test_lengths_are_needed_once(self, given_lengths, tmp_path):
        path = tmp_path / "torch.csv"
        path.write_text("0F0,0F1,0B0,0B1\n")
        with pytest.raises(ScheduleError, match=r"needs one of the two\. The file names 2 microbatches"):
            tp.Schedule.from_torch_csv(path, **given_lengths)

    @pytest.mark.parametrize("slicing", ["[(1, [4])]", "[(1, [4])] * 3", "[(1, [2, 2])] * 2"])
    def test_a_slicing_of_other_microbatches_is_refused_with_one_that_fits(self, slicing, tmp_path):
        path = tmp_path / "torch.csv"
        path.write_text("0F0,0F1,0B0,0B1\n")
        with pytest.raises(ScheduleError, match=r"runs 2 whole microbatches.*Give one like '\[\(1, \[4\]\)\] \* 2'"):
            tp.Schedule.from_torch_csv(path, slicing)

    def test_a_length_below_1_is_refused(self, tmp_path):
        path = tmp_path / "torch.csv"
        path.write_text("0F0,0B0\n")
        with pytest.raises(ScheduleError, match="seq_tokens=0"):
            tp.Schedule.from_torch_csv(path, seq_tokens=0)


@needs_torch
class TestAgainstTorch:
    @pytest.mark.parametrize("name", TABLES)
    @pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(2, 4), (4, 8)])
    def test_its_tables_read_action_by_action_and_are_valid(self, name, n_ranks, n_microbatches, tmp_path):
        ops = table(name, n_ranks, n_microbatches)
        schedule = tp.Schedule.from_torch_csv(dumped(ops, tmp_path / "torch.csv"), seq_tokens=8)
        assert schedule.validate().slicing.n_microbatches == n_microbatches
        expected = [[part for each in row if each is not None for part in each.sub_actions or [each]] for row in ops]
        expected = [[each for each in row if each.is_compute_op] for row in expected]  # GPipe's says when to reduce gradients
        assert_same(schedule.orders, expected)

    @pytest.mark.parametrize("name", TABLES[1:])
    def test_what_it_dumps_after_lowering_reads_as_the_same_order(self, name, tmp_path):
        schedule = tp.Schedule.from_torch_csv(dumped(table(name, 4, 8), tmp_path / "torch.csv"), seq_tokens=8)
        loaded = runtime(schedule)
        loaded._load_csv(str(tmp_path / "torch.csv"))
        for kind in ("compute_only", "compute_comms"):
            loaded._dump_csv(str(tmp_path / f"{kind}.csv"), format=kind)
            assert tp.Schedule.from_torch_csv(tmp_path / f"{kind}.csv", schedule.slicing) == schedule
        assert "SEND_F" in (tmp_path / "compute_comms.csv").read_text()

    @given(st.integers(0, 2**32), st.booleans())
    @settings(PROPERTY, max_examples=100)
    def test_its_reader_takes_any_schedule_written_here_and_lowers_it(self, tmp_path_factory, seed, is_split):
        rng = random.Random(seed)
        slicing = tp.uniform_slicing(8, 1, rng.randint(1, 4))
        orders = random_orders(rng, slicing, random_homes(rng, rng.randint(1, 4), 2), float(is_split))
        schedule = tp.Schedule.from_orders(dict(enumerate(orders)), slicing)
        path = schedule.to_torch_csv(tmp_path_factory.mktemp("csv") / "schedule.csv")
        loaded = runtime(schedule)
        loaded._load_csv(str(path))  # validates, adds transfers, and refuses what would hang
        assert_same(schedule.orders, loaded.pipeline_order.values())
        assert [loaded.stage_index_to_group_rank[stage] for stage in range(schedule.n_stages)] == list(schedule.stage_to_rank)
        assert tp.Schedule.from_torch_csv(path, slicing) == schedule
