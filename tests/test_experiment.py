"""Races: shuffled rounds of one launch, paired ratios with their interval, beside their own noise."""

import numpy as np
import pandas as pd
import pytest
from tiny import sleeps, spec

import terapipe as tp
from terapipe.engine.launch import Ranks
from terapipe.errors import SpecError
from terapipe.experiment import AGAIN, RaceResult, paired_speedup, prepare_race

pytestmark = pytest.mark.timeout(60)
N_ROUNDS = 6
WHOLE, HALVES = "[(1, [8])]", "[(1, [4, 4])]"


def costs_its_tokens() -> tp.CallableCost:
    """4 ms a token forward and back: halves on two ranks take 3/4 of a whole."""
    return tp.CallableCost(lambda l, c, b: 4.0 * l, lambda l, c, b: 4.0 * l)


def raced_specs() -> list[tp.RunSpec]:
    values = {"device": "emulated", "cost": costs_its_tokens(), "n_warmup_steps": 1}
    return [spec(slicing=WHOLE, schedule="gpipe", **values), spec(slicing=HALVES, **values)]


class Race:
    """A finished race, and the order of steps that its ranks were given."""

    def __init__(self, root, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[int] = []
        do = Ranks.do

        def note(ranks, job, progress=None):
            self.order += job.get("order") or []
            return do(ranks, job, progress)

        monkeypatch.chdir(root)
        monkeypatch.setattr(Ranks, "do", note)
        self.result = tp.race(raced_specs(), n_rounds=N_ROUNDS)


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Race:
    with pytest.MonkeyPatch.context() as patch:
        return Race(tmp_path_factory.mktemp("race"), patch)


class TestRace:
    def test_the_table_has_a_row_a_spec_and_the_second_copy_of_the_first(self, race):
        table = race.result.table
        assert list(table.index) == [0, 1, AGAIN]
        assert list(table.columns) == [
            *("step_ms", "predicted_ms", "speedup", "speedup_low", "speedup_high", "n_rounds", "verdict")
        ]
        assert (table["n_rounds"] == N_ROUNDS).all()
        assert (table["speedup_low"] <= table["speedup"]).all()
        assert (table["speedup"] <= table["speedup_high"]).all()

    def test_two_slices_on_two_ranks_are_4_thirds_as_fast_and_the_copy_is_not_distinguishable(self, race):  # measures time
        table = race.result.table
        assert table.loc[1, "speedup"] == pytest.approx(4 / 3, rel=0.1)
        assert table.loc[1, "verdict"] == "faster"
        assert table.loc[AGAIN, "speedup"] == pytest.approx(1, abs=0.05)
        assert race.result.aa_half_width < 0.1
        assert (table.loc[0, "speedup"], table.loc[0, "verdict"]) == (1, "the same")

    def test_emulated_steps_stand_beside_what_the_simulator_says_of_them(self, race):
        predicted = race.result.table["predicted_ms"]
        assert predicted.tolist() == [2 * 8 * 4 * 2, 2 * 8 * 4 * 2 * 3 / 4, 2 * 8 * 4 * 2]
        assert [timeline.source for timeline in race.result.predicted] == ["simulated"] * 2
        assert race.result.profile is None

    def test_rounds_are_the_steps_of_the_runs_side_by_side(self, race):
        rounds = race.result.rounds
        assert rounds.shape == (N_ROUNDS, 3)
        assert list(rounds.columns) == [0, 1, AGAIN]
        for name, run in ((0, race.result.runs[0]), (1, race.result.runs[1]), (AGAIN, race.result.again)):
            assert rounds[name].tolist() == run.timeline.steps["makespan_ms"].tolist()

    def test_every_round_takes_one_step_of_each_and_its_order_is_shuffled(self, race):
        rounds = np.array(race.order).reshape(N_ROUNDS + 1, 3)  # one warm-up round
        assert all(sorted(order) == [0, 1, 2] for order in rounds.tolist())
        assert len({tuple(order) for order in rounds.tolist()}) >= 3

    def test_the_runs_are_kept_side_by_side_and_can_be_read_again(self, race):
        directories = [run.directory for run in [*race.result.runs, race.result.again]]
        assert len({directory.parent for directory in directories}) == 1
        assert [tp.load_run(directory).timeline.source for directory in directories] == ["emulated"] * 3


class TestPrediction:
    """Of ranks that compute: slices are measured in the same launch, before the race and between its rounds."""

    def test_each_spec_is_predicted_from_slices_measured_around_its_steps(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        specs = [spec(slicing="[(1, [64])]"), spec(slicing=["[(1, [3, 61])]", "[(1, [32, 32])]"])]
        result = tp.race(specs, n_rounds=5, predict=True)
        table = result.table
        assert (table["predicted_ms"] > 0).all()
        assert table.loc[0, "predicted_ms"] == table.loc[AGAIN, "predicted_ms"]
        repeats = result.profile.frame.groupby("together")["repeat"].nunique()
        assert (repeats[False], repeats[True]) == (5 + 3, 5 + 3)  # before the race, and after every second of six rounds
        assert 3 in set(result.profile.frame["slice_tokens"])  # the shortest slice is measured, not guessed
        assert result.predicted[1].steps.index.tolist() == [0, 1]  # a step for each slicing in turn
        costs, contention = [result.profile.fit(stage) for stage in range(2)], result.profile.contention
        again = tp.simulate(specs[0].schedules[0], costs, contention=contention)
        assert result.predicted[0].makespan_ms == pytest.approx(again.makespan_ms)

    def test_one_and_two_stages_a_rank_and_split_backwards_are_predicted_together(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        cut = "[(1, [32])] * 2"
        result = tp.race([spec(schedule=name, slicing=cut) for name in ("zbv", "1f1b", "zb-h1")], n_rounds=4, predict=True)
        assert (result.table["predicted_ms"] > 0).all()
        assert result.profile.n_stages == 4  # those of spec 0
        assert {"input_ms", "weight_ms"} <= set(result.profile.frame)
        assert [each.frame["stage"].nunique() for each in result.predicted] == [4, 2, 2]
        assert "useful" in result.predicted[0].budget()

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"dtype": "float64"}, "spec 1 has another dtype than spec 0"),
            ({"slicing": "[(2, [8])]"}, r"\(seq_tokens, n_sequences\) \[\(8, 1\), \(8, 2\)\]"),
            ({"slicing": "[(1, [4])] * 4"}, "one profile predicts one size"),
        ],
    )
    def test_what_slices_of_one_model_cannot_predict_is_refused_before_any_process_starts(self, changes, said, monkeypatch):
        monkeypatch.setattr(Ranks, "__enter__", lambda ranks: pytest.fail("a process started"))
        with pytest.raises(SpecError, match=f"predict=True.*{said}"):
            tp.race([spec(slicing=f"{WHOLE} * 2"), spec(**{"slicing": f"{WHOLE} * 2"} | changes)], predict=True)


class TestPairedSpeedup:
    def test_the_median_of_known_ratios_is_found(self):
        base = np.array([10.0, 20.0, 40.0, 10.0, 30.0])
        ratios = np.array([1.2, 1.5, 1.4, 1.6, 1.3])
        speedup, low, high = paired_speedup(base, base / ratios)
        assert speedup == pytest.approx(1.4)
        assert 1.2 <= low <= 1.4 <= high <= 1.6

    def test_drift_that_both_share_does_not_widen_the_interval(self):
        drift = np.linspace(1, 3, 20)  # the machine gets three times slower
        speedup, low, high = paired_speedup(100 * drift, 80 * drift)
        assert (speedup, low, high) == pytest.approx((1.25, 1.25, 1.25))

    def test_the_interval_of_equals_holds_1_and_of_a_real_difference_does_not(self):
        noise = np.random.default_rng(1).lognormal(0, 0.05, size=(2, 40))
        _, low, high = paired_speedup(100 * noise[0], 100 * noise[1])
        assert low <= 1 <= high
        _, low, high = paired_speedup(130 * noise[0], 100 * noise[1])
        assert 1.15 < low < 1.3 < high < 1.45

    def test_the_interval_covers_the_truth_about_95_times_in_100(self):
        draws = np.random.default_rng(2)
        held = 0
        for _ in range(100):
            noise = draws.lognormal(0, 0.1, size=(2, 16))
            _, low, high = paired_speedup(noise[0], noise[1])
            held += low <= 1 <= high
        assert 88 <= held <= 100

    def test_it_is_the_same_every_time(self):
        noise = np.random.default_rng(3).lognormal(0, 0.1, size=(2, 8))
        assert paired_speedup(*noise) == paired_speedup(*noise)


def test_verdicts_say_faster_slower_or_not_distinguishable(race):
    table = race.result.table
    said = {}
    for other in (80.0, 100.0, 125.0):
        times = pd.DataFrame({0: [100.0, 101, 99, 100], 1: [other, other + 1, other - 1, other], AGAIN: [101.0, 100, 100, 99]})
        made = object.__new__(type(race.result))
        made.__dict__.update({"runs": race.result.runs, "again": race.result.again, "rounds": times})
        said[other] = made.table.loc[1, "verdict"]
        assert list(made.table.columns) == list(table.columns)
    assert said == {80.0: "faster", 100.0: "not distinguishable", 125.0: "slower"}


class TestAgainstBest:
    """Chosen on the first half of the rounds, compared on the second."""

    @staticmethod
    def raced(*columns) -> RaceResult:
        made = object.__new__(RaceResult)
        names = [*range(len(columns)), AGAIN]
        made.__dict__["rounds"] = pd.DataFrame(
            dict(zip(names, [*map(np.asarray, columns), np.asarray(columns[0])], strict=True))
        )
        return made

    def test_the_rival_is_the_fastest_of_the_first_half_whatever_the_second_says(self):
        mine, early, late = [90.0] * 8, [100.0] * 4 + [120.0] * 4, [110.0] * 4 + [80.0] * 4
        against = self.raced(mine, early, late).against_best(0)
        assert against == (1, pytest.approx(120 / 90), pytest.approx(120 / 90), pytest.approx(120 / 90), 4, "faster")

    def test_the_spec_itself_and_its_copy_are_no_rivals(self):
        against = self.raced([50.0] * 6, [100.0] * 6, [80.0] * 6).against_best(0)
        assert (against.rival, against.speedup) == (2, pytest.approx(1.6))
        assert self.raced([50.0] * 6, [100.0] * 6, [80.0] * 6).against_best(2).verdict == "slower"

    def test_the_best_of_many_equals_is_not_distinguishable_where_one_half_for_both_would_call_it_better(self):
        noise = 100 * np.random.default_rng(0).lognormal(0, 0.05, size=(300, 9, 16))
        halves, biased = [], []
        for times in noise:
            race = self.raced(*times)
            halves.append(np.log(race.against_best(0).speedup))
            best = 1 + int(np.median(times[1:], axis=1).argmin())
            biased.append(np.log(paired_speedup(times[best], times[0])[0]))
        assert abs(np.mean(halves)) < 0.005
        assert np.mean(biased) < -0.01  # the winner among noisy medians looks faster than it is

    @pytest.mark.parametrize(
        ("columns", "index", "said"),
        [
            (([1.0] * 4, [2.0] * 4), 2, r"index=2: the race has the specs 0…1"),
            (([1.0] * 4, [2.0] * 4), -1, "index=-1"),
            (([1.0] * 4,), 0, "no best of the others"),
            (([1.0] * 3, [2.0] * 3), 0, "3 rounds cannot be halved"),
        ],
    )
    def test_what_has_no_rival_is_refused(self, columns, index, said):
        with pytest.raises(SpecError, match=said):
            self.raced(*columns).against_best(index)


class TestRefusals:
    @pytest.mark.parametrize(
        ("second", "said"),
        [
            ({"n_ranks": 4}, "spec 1 has n_ranks=4, spec 0 has 2"),
            ({"device": "emulated", "cost": sleeps(1, 1)}, "spec 1 has device='emulated', spec 0 has 'cpu'"),
            ({"n_warmup_steps": 3}, "spec 1 has n_warmup_steps=3, spec 0 has 1"),
            ({"schedule": "forward-only"}, "spec 1 runs forwards alone (its schedule has no backward), spec 0 trains"),
            ({"slicing": "[(1, [4, 4])]"}, "spec 1 runs 8 tokens in round 0, spec 0 12; the table compares step times"),
            # a warm-up step begins the cycle
            ({"slicing": ["[(1, [6])]", "[(1, [12])]"]}, "spec 1 runs 6 tokens in round 1, spec 0 12"),
        ],
    )
    def test_specs_that_cannot_alternate_are_refused_with_both_values(self, second, said):
        with pytest.raises(SpecError) as refusal:
            tp.race([spec(), spec(**second)])
        assert said in str(refusal.value)

    def test_a_directory_is_refused(self, tmp_path):
        with pytest.raises(SpecError, match=r"spec 1 has directory=.*a race makes its own"):
            tp.race([spec(), spec(tmp_path / "mine")])

    @pytest.mark.parametrize("n_rounds", [0, 1, 2.5])
    def test_fewer_than_2_rounds_are_refused(self, n_rounds):
        with pytest.raises(SpecError, match=f"n_rounds={n_rounds}: needs an integer of at least 2"):
            tp.race([spec()], n_rounds=n_rounds)

    def test_nothing_to_race_is_refused(self):
        with pytest.raises(SpecError, match="needs at least one spec"):
            tp.race([])

    def test_a_prepared_race_ends_with_the_copy_of_the_first(self):
        prepared = prepare_race([spec(), spec(seed=3)], 7)
        assert [(each.seed, each.n_steps) for each in prepared] == [(0, 7), (3, 7), (0, 7)]
