"""Sweeps: every combination once, the simulator's own numbers, and nothing computed twice."""

import json
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from tiny import MODEL, sleeps

import terapipe as tp
from terapipe.engine import launch
from terapipe.errors import RunError, SpecError
from terapipe.experiment import cells, rows

COST = tp.CallableCost(lambda l, c, b: b * (1.0 + l * (1 + c / 64)), lambda l, c, b: b * (2.0 + 2 * l))
GRID = {"n_ranks": [2, 4], "schedule": ["terapipe", "seq1f1b"], "seq_tokens": 16, "n_slices": [1, 4], "cost": COST}


class Same(tp.CostModel):
    """Costs of 1 and 2 ms that are extrapolated where another model's are."""

    def __init__(self, other: tp.CostModel):
        self.other = other

    def forward_ms(self, slice_tokens, context_tokens, n_sequences=1):
        return 1.0 + 0 * slice_tokens

    def backward_ms(self, slice_tokens, context_tokens, n_sequences=1):
        return 2.0 + 0 * slice_tokens

    def is_extrapolated(self, slice_tokens, context_tokens, n_sequences=1):
        return self.other.is_extrapolated(slice_tokens, context_tokens, n_sequences)


@pytest.fixture
def simulated(monkeypatch):
    """The cells that were simulated, as they happen."""
    done = []
    simulate = cells.simulate

    def note(schedule, *arguments):
        done.append(schedule)
        return simulate(schedule, *arguments)

    monkeypatch.setattr(cells, "simulate", note)
    return done


def sweep(grid, directory, **values) -> pd.DataFrame:
    return tp.sweep(grid, directory=directory, progress=False, **values)


def lines_of(directory) -> list[str]:
    return (directory / "rows.jsonl").read_text("utf-8").splitlines()


class TestTable:
    def test_a_row_for_each_combination_the_last_keys_values_fastest(self, tmp_path):
        frame = sweep(GRID, tmp_path)
        results = ["spec_hash", "makespan_ms", "bubble_fraction", "bubble_overhead", "tokens_per_second", "peak_in_flight"]
        assert list(frame.columns) == [*GRID, *results, "source", "refused"]
        assert list(zip(frame["n_ranks"], frame["schedule"], frame["n_slices"], strict=True)) == [
            (n_ranks, schedule, n_slices) for n_ranks in (2, 4) for schedule in ("terapipe", "seq1f1b") for n_slices in (1, 4)
        ]
        assert set(frame["cost"]) == {"CallableCost"}
        assert set(frame["source"]) == {"simulated"}
        assert frame["spec_hash"].is_unique
        assert frame["spec_hash"].str.fullmatch("[0-9a-f]{16}").all()

    def test_the_numbers_are_the_timelines(self, tmp_path):
        grid = GRID | {
            "n_microbatches": 3,
            "n_sequences": 2,
            "link": tp.Link(0.5, 1e-6),
            "bytes_per_token": 1,
            "contention": 1.2,
        }
        for row in sweep(grid, tmp_path).itertuples():
            schedule = tp.build_schedule(row.schedule, row.n_ranks, tp.uniform_slicing(16, row.n_slices, 3, 2))
            timeline = tp.simulate(schedule, COST, tp.Link(0.5, 1e-6), 1, 1.2)
            for name in ("makespan_ms", "bubble_fraction", "bubble_overhead", "tokens_per_second"):
                assert getattr(row, name) == getattr(timeline, name)
            assert row.peak_in_flight == timeline.peak_in_flight().max()

    def test_labels_stand_for_costs_and_lists_for_values_of_any_kind(self, tmp_path):
        grid = {
            "cost": {"cheap": sleeps(1, 1), "two stages": [sleeps(1, 1), sleeps(2, 2)]},
            "n_ranks": 2,
            "slicing": ["[(1, [8])]", tp.Slicing.parse("[(1, [4, 4])]")],
            "link": [None, tp.Link(1.0), {(0, 1): tp.Link(2.0), (1, 0): tp.Link(2.0)}],
        }
        frame = sweep(grid, tmp_path)
        assert list(frame["cost"].unique()) == ["cheap", "two stages"]
        assert list(frame["slicing"].unique()) == ["[(1, [8])]", "[(1, [4, 4])]"]
        assert frame["link"].nunique(dropna=False) == 3
        assert frame["spec_hash"].is_unique
        assert sweep(grid | {"cost": [sleeps(1, 1), sleeps(2, 2)]}, tmp_path)["cost"].unique().tolist() == [
            "CallableCost 0",
            "CallableCost 1",
        ]

    def test_a_range_and_an_array_are_values_and_numbers_stay_numbers(self, tmp_path):
        frame = sweep(GRID | {"n_ranks": range(1, 4), "contention": np.array([1.0, 1.5])}, tmp_path)
        assert sorted(frame["n_ranks"].unique()) == [1, 2, 3]
        assert frame["contention"].dtype == np.float64

    @pytest.mark.parametrize(
        "values", [{2, 4}, (n for n in (2, 4)), {"two": np.int64(2), "four": 4}, pd.Series([2, 4]), iter([2, 4])]
    )
    def test_whatever_can_be_iterated_over_is_values(self, tmp_path, values):
        frame = sweep(GRID | {"n_ranks": values, "contention": np.array(1.0)}, tmp_path)
        assert len(frame) == 8
        assert set(frame["n_ranks"]) in ({2, 4}, {"two", "four"})
        assert set(frame["contention"]) == {1.0}
        assert (frame["refused"] == "").all()

    def test_a_schedule_typed_by_hand_brings_ranks_and_slicing(self, tmp_path):
        typed = tp.Schedule.from_orders({0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1"}, "[(1, [4])] * 2", "mine")
        frame = sweep({"schedule": [typed], "cost": COST}, tmp_path)
        assert frame.loc[0, "schedule"] == "mine"
        assert frame.loc[0, "makespan_ms"] == tp.simulate(typed, COST).makespan_ms
        other = sweep({"schedule": typed, "cost": COST, "n_ranks": 3}, tmp_path)
        assert "was made for 2 ranks" in other.loc[0, "refused"]
        same, deeper = (sweep({"schedule": typed, "cost": COST, "chunks_per_rank": v}, tmp_path) for v in (1, 2))
        assert same.loc[0, "makespan_ms"] == frame.loc[0, "makespan_ms"]
        assert "chunks_per_rank=2: the schedule 'mine' was built with chunks_per_rank=1" in deeper.loc[0, "refused"]

    def test_impossible_halves_refuse_only_what_runs_them_apart(self, tmp_path):
        cost = tp.CallableCost(COST.forward_ms, COST.backward_ms, lambda l, c, b: 9 * COST.backward_ms(l, c, b))
        frame = sweep({"n_ranks": 2, "seq_tokens": 8, "schedule": ["1f1b", "zb-h1"], "cost": cost}, tmp_path)
        assert frame.loc[0, "refused"] == ""
        assert "is more than backward_ms" in frame.loc[1, "refused"]


class TestStagesPerRank:
    BASE: ClassVar = {"n_ranks": 2, "seq_tokens": 8, "n_microbatches": 4}

    @pytest.mark.parametrize(
        "values",
        [
            {"schedule": ["1f1b", "zbv"]},
            {"schedule": ["1f1b", "looped-bfs"]},
            {"schedule": "interleaved", "chunks_per_rank": [1, 2]},
            {"schedule": ["1f1b", "interleaved"], "chunks_per_rank": [1, 2]},
            {"schedule": {"mine": tp.build_schedule("zbv", 2, "[(1, [8])] * 4"), "1f1b": "1f1b"}},
        ],
    )
    def test_one_cost_over_several_numbers_of_stages_a_rank_is_refused(self, tmp_path, values):
        with pytest.raises(
            SpecError, match=r"stages a rank, 1 \(.*\), 2 \(.*Sweep each number apart, with cost=StageShare\(cost, 2\)"
        ):
            sweep(self.BASE | {"cost": COST} | values, tmp_path)

    def test_each_apart_or_one_cost_a_stage_is_swept(self, tmp_path):
        """Shared, two stages on a rank do the work of one: a rank of P ranks and M microbatches is busy M·(F + B)."""
        one = sweep(self.BASE | {"schedule": "1f1b", "cost": COST}, tmp_path)
        two = sweep(self.BASE | {"schedule": ["interleaved", "zbv"], "cost": tp.StageShare(COST, 2)}, tmp_path)
        busy = [row.makespan_ms * (1 - row.bubble_fraction) for row in pd.concat([one, two]).itertuples()]
        assert busy == pytest.approx([4 * float(COST.step_ms(8, 0))] * 3)
        listed = sweep(self.BASE | {"schedule": ["1f1b", "interleaved"], "cost": [[COST] * 2]}, tmp_path)
        assert listed.loc[0, "makespan_ms"] == one.loc[0, "makespan_ms"]
        assert "2 cost models for 4 stages" in listed.loc[1, "refused"]

    def test_cells_that_cannot_be_are_no_other_number(self, tmp_path):
        frame = sweep(self.BASE | {"schedule": ["1f1b", "seq1f1"], "chunks_per_rank": [1, 2], "cost": COST}, tmp_path)
        assert (frame["refused"] == "").tolist() == [True, False, False, False]


class TestRefusedCells:
    def test_a_cell_that_cannot_be_keeps_its_row_with_the_reason_and_no_numbers(self, tmp_path):
        for _ in range(2):  # the second from disk
            frame = sweep(GRID | {"schedule": ["1f1b", "terapipe"]}, tmp_path)
            refused = frame[frame["refused"] != ""]
            assert refused[["n_ranks", "schedule", "n_slices"]].to_numpy().tolist() == [[2, "1f1b", 4], [4, "1f1b", 4]]
            assert refused["refused"].str.contains("1f1b runs whole microbatches").all()
            assert refused[["makespan_ms", "bubble_fraction", "peak_in_flight"]].isna().to_numpy().all()
            assert frame["spec_hash"].is_unique

    def test_a_cell_that_cannot_be_described_too(self, tmp_path):
        table = pd.DataFrame({"slice_tokens": [8], "context_tokens": [0], "forward_ms": [1.0], "backward_ms": [2.0]})
        frame = sweep(GRID | {"n_slices": [2, 17], "cost": {"table": tp.TableCost(table)}}, tmp_path)
        assert frame["refused"].str.contains("does not reach|17 slices of 16 tokens").all()
        assert frame["spec_hash"].is_unique

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"slicing": [64, 64]}, "slicing=64: needs a Slicing, or its notation"),
            ({"slicing": [[(1, [8])]]}, "needs a Slicing, or its notation"),
            ({"schedule": [None]}, "schedule=None: needs a family's name or a Schedule"),
            ({"schedule": 3}, "schedule=3: needs a family's name"),
            ({"link": "x"}, "link='x': needs a Link"),
            ({"link": [{(0, 1): 2.0}]}, "needs a Link"),
            ({"link": [{0: tp.Link(1.0)}]}, "needs a Link"),
            ({"bytes_per_token": "x"}, "bytes_per_token='x': needs a number"),
            ({"contention": ["a"]}, "contention='a': needs a number"),
            ({"contention": [True]}, "contention=True: needs a number"),
            ({"n_ranks": "2"}, "n_ranks='2': needs an integer of at least 1"),
            ({"chunks_per_rank": [[1]]}, "chunks_per_rank=[1]: needs an integer"),
            ({"n_slices": 1.5}, "n_slices=1.5: needs an integer"),
            ({"seq_tokens": {"a set": {8}}}, "seq_tokens={8}: needs an integer"),
        ],
    )
    def test_a_value_of_a_wrong_type_is_a_refused_cell(self, tmp_path, values, said):
        base = {"n_ranks": 2, "cost": COST} | ({} if "slicing" in values else {"seq_tokens": 16})
        for _ in range(2):
            frame = sweep(base | values, tmp_path)
            assert frame["refused"].str.contains(said, regex=False).all(), frame["refused"].tolist()
            assert frame["makespan_ms"].isna().all()

    @pytest.mark.parametrize(
        "values",
        [
            {"slicing": [64, 64]},
            {"schedule": [None]},
            {"n_ranks": "x"},
            {"stage": 3},
            {"text": b"x"},
            {"cost": 1},
            {"model": 7},
        ],
    )
    def test_of_a_run_too(self, tmp_path, values):
        frame = sweep({"model": MODEL, "slicing": "[(1, [8])]"} | values, tmp_path, how="run")
        assert (frame["refused"] != "").all()

    def test_another_error_is_raised(self, tmp_path):
        def broken(l, c, b):
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            sweep(GRID | {"cost": tp.CallableCost(broken, broken)}, tmp_path)


class TestCache:
    def test_what_is_known_is_not_simulated_again(self, tmp_path, simulated):
        first = sweep(GRID, tmp_path)
        assert (len(simulated), first.attrs["n_cached"]) == (8, 0)
        again = sweep(GRID, tmp_path)
        assert (len(simulated), again.attrs["n_cached"]) == (8, 8)
        pd.testing.assert_frame_equal(first, again)

    def test_a_wider_grid_computes_only_what_is_new(self, tmp_path, simulated):
        sweep(GRID, tmp_path)
        wider = sweep(GRID | {"n_slices": [1, 2, 4]}, tmp_path)
        assert (len(simulated), wider.attrs["n_cached"]) == (12, 8)

    def test_an_interrupted_sweep_goes_on_where_it_stopped_even_from_a_torn_line(self, tmp_path, simulated, monkeypatch):
        done, real = [], cells.simulate

        def stop(*arguments):
            if len(done) == 3:
                raise KeyboardInterrupt
            done.append(1)
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(cells, "simulate", stop)
            with pytest.raises(KeyboardInterrupt):
                sweep(GRID, tmp_path)
        assert len(lines_of(tmp_path)) == 3
        path = tmp_path / "rows.jsonl"
        path.write_text(path.read_text("utf-8")[:-20], "utf-8")
        simulated.clear()
        frame = sweep(GRID, tmp_path)
        assert (len(simulated), frame.attrs["n_cached"]) == (6, 2)
        assert sweep(GRID, tmp_path).attrs["n_cached"] == 8

    def test_costs_are_known_by_what_they_say_of_the_cells_slices(self, tmp_path, simulated):
        sweep(GRID | {"cost": sleeps(1, 2)}, tmp_path)
        sweep(GRID | {"cost": {"the same": tp.CallableCost(lambda l, c, b: 1.0 + 0 * l, lambda l, c, b: 2.0)}}, tmp_path)
        assert len(simulated) == 8
        elsewhere = tp.CallableCost(lambda l, c, b: np.where(l == 5, 7.0, 1.0), lambda l, c, b: 2.0)
        sweep(GRID | {"cost": elsewhere}, tmp_path)
        assert len(simulated) == 8
        sweep(GRID | {"cost": sleeps(1, 3)}, tmp_path)
        assert len(simulated) == 16

    @pytest.mark.parametrize(
        "change",
        [
            {"n_ranks": 3},
            {"seq_tokens": 32},
            {"n_microbatches": 2},
            {"contention": 2.0},
            {"link": tp.Link(1.0)},
            {"schedule": "gpipe"},
        ],
    )
    def test_everything_that_decides_the_result_is_in_the_hash(self, tmp_path, change):
        base = {"n_ranks": 2, "seq_tokens": 16, "cost": COST}
        hashes = [sweep(grid, tmp_path).loc[0, "spec_hash"] for grid in (base, base | change)]
        assert hashes[0] != hashes[1]

    def test_whether_a_cost_is_extrapolated_is_in_the_hash(self, tmp_path):
        table = pd.DataFrame({"slice_tokens": [8, 16, 8], "context_tokens": [0, 0, 8], "forward_ms": 2.0, "backward_ms": 3.0})
        whole = tp.TableCost(table)
        part = tp.TableCost(table[:1], extrapolate=True)
        point = {"n_ranks": 2, "seq_tokens": 16}
        frame = sweep(point | {"cost": {"part": Same(part), "whole": Same(whole)}}, tmp_path)
        assert frame["source"].tolist() == ["simulated, extrapolated", "simulated"]
        assert frame.loc[0, "makespan_ms"] == frame.loc[1, "makespan_ms"]
        assert frame["spec_hash"].is_unique

    def test_a_byte_that_is_no_text_costs_its_line_only(self, tmp_path, simulated):
        sweep(GRID, tmp_path)
        path = tmp_path / "rows.jsonl"
        first, rest = path.read_bytes().split(b"\n", 1)
        path.write_bytes(b"\xff" + first + b"\n" + rest)
        assert sweep(GRID, tmp_path).attrs["n_cached"] == 7
        path.write_bytes(path.read_bytes() + b'{"version": "x", "spec_hash": [1]}\n[]\n\xfe\n')
        assert sweep(GRID, tmp_path).attrs["n_cached"] == 8

    def test_rows_of_another_version_are_left_alone(self, tmp_path, simulated, monkeypatch):
        sweep(GRID, tmp_path)
        monkeypatch.setattr(rows.metadata, "version", lambda package: "0.0.0")
        assert sweep(GRID, tmp_path).attrs["n_cached"] == 0
        assert len(lines_of(tmp_path)) == 16

    def test_the_default_folder_is_runs_sweeps(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        tp.sweep(GRID, progress=False)
        assert len(lines_of(tmp_path / "runs" / "sweeps")) == 8

    def test_a_row_on_disk_is_plain_json(self, tmp_path):
        sweep(GRID | {"schedule": "1f1b"}, tmp_path)
        for line in lines_of(tmp_path):
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


class TestRuns:
    VALUES = {"model": MODEL, "n_steps": 2, "device": "emulated", "cost": {"2 ms": sleeps(1, 1)}, "n_ranks": 2}  # noqa: RUF012
    GRID = VALUES | {"schedule": ["terapipe", "gpipe"], "slicing": ["[(1, [8])]", "[(1, [4, 4])]"]}

    @pytest.mark.timeout(120)
    def test_runs_are_measured_once_refused_cells_kept_and_folders_named(self, tmp_path):
        frame = sweep(self.GRID, tmp_path, how="run")
        assert frame["refused"].str.contains("gpipe runs whole").tolist() == [False, False, False, True]
        ran = frame[frame["refused"] == ""]
        assert set(ran["source"]) == {"emulated"}
        assert set(frame["model"]) == {"ModelConfig"}
        for row in ran.itertuples():
            run = tp.load_run(row.directory)
            assert run.timeline.makespan_ms == row.makespan_ms
            assert str(run.spec.slicings[0]) == row.slicing
        again = sweep(self.GRID, tmp_path, how="run")
        assert again["makespan_ms"].equals(frame["makespan_ms"])
        assert again.attrs["n_cached"] == 3

    @pytest.mark.timeout(120)
    def test_a_run_that_sleeps_for_extrapolated_costs_says_so(self, tmp_path):
        beyond = Same(tp.TableCost(pd.DataFrame({"slice_tokens": [4], "context_tokens": 0, "forward_ms": 1, "backward_ms": 2})))
        values = self.VALUES | {"slicing": "[(1, [8])]", "cost": {"beyond": beyond, "within": sleeps(1, 2)}}
        frame = sweep(values, tmp_path, how="run")
        assert frame["source"].tolist() == ["emulated, extrapolated", "emulated"]
        assert frame["spec_hash"].is_unique
        spec = tp.load_run(frame.loc[0, "directory"]).spec
        assert tp.RunSpec.from_json(spec.to_json()).is_extrapolated
        assert not tp.load_run(frame.loc[1, "directory"]).spec.is_extrapolated

    def test_a_run_that_fails_raises_and_what_came_before_is_kept(self, tmp_path, monkeypatch):
        done = []

        def run(spec):
            if done:
                raise RunError("rank 1 failed", 1)
            done.append(spec)
            return type("Done", (), {"timeline": tp.simulate(spec.schedules[0], COST), "directory": spec.directory})

        monkeypatch.setattr(launch, "run", run)
        with pytest.raises(RunError, match="rank 1 failed"):
            sweep(self.GRID, tmp_path, how="run")
        assert len(lines_of(tmp_path)) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("grid", "how", "said"),
        [
            ({"n_rank": 2}, "simulate", "unknown key of a sweep 'n_rank'. Did you mean 'n_ranks'"),
            ({"n_ranks": 2, "slicing": "[(1, [8])]"}, "simulate", "a sweep needs cost; given: n_ranks, slicing"),
            ({"cost": COST}, "simulate", r"needs n_ranks, seq_tokens \(or a slicing\); given: cost"),
            ({}, "simulate", "given: nothing"),
            (GRID | {"slicing": "[(1, [8])]"}, "simulate", "slicing and seq_tokens, n_slices: those are for equal slices"),
            (GRID | {"n_slices": []}, "simulate", r"n_slices=\[\]: a sweep needs at least one value"),
            (GRID | {"cost": [1.0]}, "simulate", "cost=1.0: needs a CostModel"),
            ({"model": MODEL, "step": 3}, "run", "unknown key of a sweep of runs 'step'"),
            ({"model": MODEL, "slicing": "[(1, [8])]", "directory": "x"}, "run", "unknown key of a sweep of runs 'directory'"),
            ({"model": MODEL}, "run", "a sweep needs slicing"),
            ([1], "simulate", r"grid=\[1\]: needs {key: value or list of values}"),
            (GRID, "simulated", "unknown way to sweep 'simulated'. Did you mean 'simulate'"),
        ],
    )
    def test_a_grid_of_which_no_cell_can_be_made(self, grid, how, said, tmp_path):
        with pytest.raises(SpecError, match=said):
            sweep(grid, tmp_path, how=how)


def test_sweeps_of_simulations_need_no_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\nimport terapipe as tp\n"
        "cost = tp.CallableCost(lambda l, c, b: 1.0 + l, lambda l, c, b: 2.0 * l)\n"
        "print(len(tp.sweep({'n_ranks': [1, 2], 'seq_tokens': 8, 'cost': cost})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "2", done.stderr
