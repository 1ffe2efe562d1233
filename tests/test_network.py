"""A slower network, tried on one machine: no message is early, the order is the simulator's, gradients stay exact."""

import json

import pytest
from tiny import MODEL, orders_of, planned, sleeps

import terapipe as tp
from terapipe.errors import CostError, SpecError
from terapipe.plots import style

CUT = "[(1, [40, 24]), (1, [64])]"
LINKS = {
    "latency": tp.Link(latency_ms=6.0),
    "bandwidth": tp.Link(bandwidth_gb_s=1e-4),
    "both": tp.Link(3.0, 2e-4),
    "busy while it sends": tp.Link(3.0, 2e-4, overlap=False),
    "a pair": {(0, 1): tp.Link(9.0), (1, 0): tp.Link(), (1, 2): tp.Link(1.0), (2, 1): tp.Link(2.0, 2e-4)},
}


def emulated(link: object, **values: object) -> tp.RunSpec:
    given = {"n_ranks": 3, "device": "emulated", "cost": sleeps(4, 6), "n_steps": 2, "schedule": "seq1f1b"}
    return tp.RunSpec(MODEL, CUT, link=link, **(given | values))


@pytest.mark.timeout(120)
def test_emulated_ranks_are_never_ahead_of_the_simulated_link(tmp_path):
    specs = [emulated(link, directory=tmp_path / name) for name, link in LINKS.items()]
    for spec, run in zip(specs, tp.run(specs), strict=True):
        simulated = tp.simulate(spec.schedules[0], spec.cost, spec.link, spec.bytes_per_token)
        for _, rows in run.timeline.measured.groupby("step"):
            both = simulated.frame.merge(rows, on=["rank", "stage", "kind", "microbatch", "slice"], suffixes=("", "_run"))
            assert len(both) == len(rows)
            late = both["start_ms_run"] - both["start_ms"]
            assert late.min() > -0.05, spec.link  # stamps are whole nanoseconds, timer wake-ups microseconds
            assert orders_of(rows) == planned(spec.schedules[0])
        assert run.timeline.source == "emulated, link given"
        assert tp.replay(run.timeline).source == "replayed, emulated, link given"
        assert run.summary()["link"] == str(spec.link)
        assert (run.timeline.frame["n_bytes"] > 0).sum() == (simulated.frame["n_bytes"] > 0).sum() * 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("link", [LINKS["both"], LINKS["busy while it sends"]])
def test_gradients_are_exact_over_a_slow_link(link):
    spec = tp.RunSpec(MODEL, CUT, schedule="seq1f1b", n_ranks=2, dtype="float64", link=link)
    assert tp.verify(spec)["max_relative_error"].max() <= 1e-10


@pytest.mark.parametrize("link", [None, *LINKS.values()], ids=["none", *LINKS])
def test_links_travel_with_the_spec(link):
    spec = emulated(link)
    assert tp.RunSpec.from_json(spec.to_json()).link == link


@pytest.mark.timeout(60)
def test_a_measured_run_says_that_its_link_was_given(tmp_path):
    cut = "[(1, [40, 24])]"
    specs = [tp.RunSpec(MODEL, cut, n_steps=1, link=link, directory=tmp_path / str(link)) for link in (None, tp.Link(1.0))]
    plain, given = tp.run(specs)
    assert [run.timeline.source for run in (plain, given)] == ["measured", "measured, link given"]
    assert [run.summary()["link"] for run in (plain, given)] == ["", str(tp.Link(1.0))]
    assert tp.replay(given.timeline).source == "replayed, link given"
    assert style.badge("measured, link given", "")["bgcolor"] == style.SOURCES["measured"]


@pytest.mark.parametrize("link", [[[0, 1]], [5], [[0, 1, 5]], [[[], 1, {}]], 5, "fast", {"speed": 3}])
def test_a_record_whose_link_cannot_be_read_is_refused_with_its_value(link):
    record = json.loads(emulated(None).to_json()) | {"link": link}
    with pytest.raises(CostError, match=r"link=.*needs the numbers of one link by name, or a list"):
        tp.RunSpec.from_json(json.dumps(record))


@pytest.mark.parametrize("pair", [(7, 8), (0, 3), (-1, 0)])
def test_a_link_of_ranks_that_are_not_there_is_refused_with_them(pair):
    with pytest.raises(SpecError, match=rf"\({pair[0]}, {pair[1]}\) names a rank that is not there.*the ranks 0…2"):
        emulated({(0, 1): tp.Link(), (1, 0): tp.Link(), (1, 2): tp.Link(), (2, 1): tp.Link(), pair: tp.Link()})


def test_a_missing_pair_is_refused_by_its_ranks_before_any_process():
    with pytest.raises(CostError, match=r"no link from rank 1 to rank 0; links are given for \[\(0, 1\)\]"):
        emulated({(0, 1): tp.Link(1.0)})


@pytest.mark.parametrize("link", [3.0, "fast", {"0-1": tp.Link()}, {(0, 1): 3.0}])
def test_what_is_no_link_is_refused_with_its_value(link):
    with pytest.raises(SpecError, match="needs a Link"):
        emulated(link)
