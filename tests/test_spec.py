"""RunSpec refuses every run that cannot start, before any process does; the rest travels as JSON and comes back."""

import json
import multiprocessing.process
import os
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from tiny import MODEL, SLICED, sleeps, spec

import terapipe as tp
from terapipe.engine.model import DecoderStage
from terapipe.errors import TerapipeError
from terapipe.spec import RunSpec, stage_path

TWO = "[(1, [4])] * 2"


class StageOfThisFile(DecoderStage):
    pass


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """A specification starts nothing."""
    for home, name in ((os, "fork"), (subprocess.Popen, "__init__"), (multiprocessing.process.BaseProcess, "start")):
        monkeypatch.setattr(home, name, lambda *_, **__: pytest.fail("a process was started"))


def schedule(*orders: str, slicing: str = TWO) -> dict[str, object]:
    """A typed schedule with the slicing it was made for."""
    return {"schedule": tp.Schedule.from_orders(dict(enumerate(orders)), slicing), "slicing": slicing}


def local_stage() -> type:
    class Local(DecoderStage):
        pass

    return Local


GOOD = ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0")

# What is wrong, the values given, and what the message must hold: the value, what is allowed, what to do.
REFUSALS = {
    # sizes that do not fit each other
    "more stages than layers": ({"n_ranks": 5}, ["5 stages for 4 layers", "at most 4 stages"]),
    "more chunks than layers": (
        {"schedule": "interleaved", "slicing": TWO, "n_ranks": 2, "chunks_per_rank": 3},
        ["6 stages for 4 layers"],
    ),
    "stages that are not ranks x chunks": (
        {**schedule("0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0", "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"), "chunks_per_rank": 1},
        ["chunks_per_rank=1", "up to 2 stages on a rank", "4 stages on 2 ranks", "or leave it out"],
    ),
    "chunks with a family of one stage a rank": ({"chunks_per_rank": 2}, ["chunks_per_rank=2", "terapipe places one stage"]),
    "a schedule of fewer ranks": ({"n_ranks": 3, **schedule(*GOOD)}, ["2 ranks", "n_ranks=3", "n_ranks=2"]),
    "a schedule of more ranks": ({"n_ranks": 1, **schedule(*GOOD)}, ["2 ranks", "n_ranks=1"]),
    "a schedule for another slicing": ({**schedule(*GOOD), "slicing": SLICED}, [TWO, SLICED, "slicing=schedule.slicing"]),
    "a schedule for two slicings": ({**schedule(*GOOD), "slicing": [TWO, TWO]}, ["a schedule runs one slicing"]),
    # slicings
    "microbatches of other lengths": ({"slicing": "[(1, [4]), (1, [3])]"}, ["microbatch 1 has 3 tokens", "microbatch 0 has 4"]),
    "an empty slice": ({"slicing": "[(1, [4, 0, 2])]"}, ["slice 1 of [4, 0, 2] has 0 tokens", "at least 1", "Leave it out"]),
    "no sequences": ({"slicing": "[(0, [4])]"}, ["0 sequences", "at least 1"]),
    "no slices": ({"slicing": "[(1, [])]"}, ["'[(1, [])]' is not a slicing", "a whole number", "is expected at character 6"]),
    "no microbatches": ({"slicing": "[]"}, ["'[]' is not a slicing"]),
    "no slicings": ({"slicing": []}, ["slicing=[]", "at least one"]),
    "a sequence beyond the positions": ({"slicing": "[(1, [40, 25])]"}, ["has 65 tokens", "max_seq_tokens=64", "Shorten it"]),
    "one of several slicings beyond the positions": ({"slicing": [SLICED, "[(1, [65])]"]}, ["65 tokens", "64 positions"]),
    "a sequence beyond the rotary positions": (
        {"model": tp.ModelConfig(4, 8, 2, max_seq_tokens=8, position="rotary"), "slicing": "[(1, [9])]"},
        ["9 tokens", "max_seq_tokens=8"],
    ),
    "text that is not a slicing": ({"slicing": "terapipe"}, ["'terapipe' is not a slicing", "at character 0", "reads like"]),
    "text cut short": ({"slicing": "[(1, [4, 4"}, ["is not a slicing", "']' is expected at character 10"]),
    "a number for a slicing": ({"slicing": 4}, ["slicing=4", "needs a Slicing", "'[(1, [1024, 1024])]'"]),
    "nothing for a slicing": ({"slicing": None}, ["slicing=None", "needs a Slicing"]),
    "a list of lengths for a slicing": ({"slicing": [4, 4]}, ["slicing=4", "or a list of them"]),
    # layers and model
    "a split that drops a layer": ({"layers_per_stage": [1, 2]}, ["[1, 2]", "adds up to 3", "drop 1", "add up to 4"]),
    "a split that repeats a layer": ({"layers_per_stage": [3, 2]}, ["[3, 2]", "adds up to 5", "repeat 1"]),
    "a split with an empty stage": ({"layers_per_stage": [4, 0]}, ["[4, 0]", "at least one layer"]),
    "a split of other stages": ({"layers_per_stage": [1, 1, 2]}, ["[1, 1, 2]", "3 stages", "there are 2"]),
    "a model that is none": ({"model": "tour"}, ["model='tour'", "ModelConfig.preset('tour')"]),
    # schedules
    "an unknown family": ({"schedule": "terrapipe"}, ["schedule 'terrapipe'", "Did you mean 'terapipe'?", "gpipe", "1f1b"]),
    "a schedule that is none": ({"schedule": 7}, ["schedule=7", "a family's name or a Schedule"]),
    "gpipe with slices": ({"schedule": "gpipe"}, ["gpipe runs whole microbatches", "3 slices", "Use 'terapipe'"]),
    "1f1b with slices": ({"schedule": "1f1b"}, ["1f1b runs whole microbatches", "Use 'seq1f1b'"]),
    "a missing action": (schedule("0F0 0F1 0B1 0B0", "1F0 1F1 1B1"), ["1B0.0 is missing on rank 1", ">nothing<"]),
    "an action twice": (schedule("0F0 0F1 0B1 0B0 0B0", "1F0 1F1 1B1 1B0"), ["0B0.0 appears twice", "steps 3 and 4", ">0B0"]),
    "an action that does not exist": (schedule("0F0 0F2 0B2 0B0", "1F0 1F1 1B1 1B0"), ["0F2.0", "microbatches 0…1", ">0F2.0<"]),
    "a wrong order": (
        schedule("0F0 0F1 0B1 0B0", "1F0 1B1 1F1 1B0"),
        ["wrong order on rank 1", "1B1.0 at step 1 needs 1F1.0", "at step 2", ">1B1.0<", "rank 0"],
    ),
    "a deadlock": (
        schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"),
        ["deadlock", "rank 0 waits at 0B0.0 for 1B0.0", "rank 1 waits at 1F1.0 for 0F1.0", ">0B0.0<", ">1F1.0<"],
    ),
    "the memory of forwards alone": (
        {"schedule": "forward-only", "measure_memory": True},
        ["measure_memory=True", "forwards alone", "Leave it out"],
    ),
    # plain values
    "ranks as text": ({"n_ranks": "2"}, ["n_ranks='2'", "integer of at least 1"]),
    "no ranks": ({"n_ranks": 0}, ["n_ranks=0", "at least 1"]),
    "true for a number": ({"n_ranks": True}, ["n_ranks=True", "integer"]),
    "a broken number of chunks": ({"chunks_per_rank": 1.5}, ["chunks_per_rank=1.5", "integer of at least 1"]),
    "no steps": ({"n_steps": 0}, ["n_steps=0", "at least 1"]),
    "less than no warm-up": ({"n_warmup_steps": -1}, ["n_warmup_steps=-1", "at least 0"]),
    "a negative seed": ({"seed": -1}, ["seed=-1", "at least 0"]),
    "an unknown dtype": ({"dtype": "float23"}, ["unknown dtype 'float23'", "Did you mean 'float32'?", "float64"]),
    "an unknown device": ({"device": "emulate"}, ["unknown device 'emulate'", "Did you mean 'emulated'?", "cpu, cuda"]),
    "a rate of nothing": ({"learning_rate": 0}, ["learning_rate=0", "positive number"]),
    "a rate that is no number": ({"learning_rate": float("nan")}, ["learning_rate=nan", "positive number"]),
    "a rate as text": ({"learning_rate": "1e-3"}, ["learning_rate='1e-3'", "positive number"]),
    "an infinite norm": ({"clip_grad_norm": float("inf")}, ["clip_grad_norm=inf", "positive number"]),
    "a norm below 0": ({"clip_grad_norm": -1.0}, ["clip_grad_norm=-1.0", "positive number"]),
    "a text that is not there": ({"text": "no/such.txt"}, ["text='no/such.txt'", "no such file", "None for Python's own"]),
    # costs
    "emulated without a cost": ({"device": "emulated"}, ["device='emulated' needs cost="]),
    "a cost for ranks that compute": ({"cost": sleeps(1, 1)}, ["device='cpu' takes no cost", "'emulated'"]),
    "too few costs": ({"device": "emulated", "cost": [sleeps(1, 1)]}, ["1 costs for 2 stages", "one for all, or one for each"]),
    "a negative cost": ({"device": "emulated", "cost": sleeps(-1, 1)}, ["-1.0 ms at slice_tokens=3", "must be ≥ 0"]),
    "a forbidden slice": (
        {"device": "emulated", "cost": tp.CallableCost(lambda l, c, b: np.where(l == 5, np.inf, 1), lambda l, c, b: 1)},
        ["sleep forever", "'slice_tokens': 5", "another slicing"],
    ),
    # stages
    "a stage of a function": ({"stage": local_stage()}, ["Local' is defined in a", "inside a function", "into a file"]),
    "a stage without a class": ({"stage": "thin_stage"}, ["stage='thin_stage'", "'package.module:Class'"]),
    "a stage of no module": ({"stage": "no_such_module:Stage"}, ["no module 'no_such_module'", "sys.path"]),
    "a stage of no package": ({"stage": "no_such.module:Stage"}, ["no module 'no_such.module'"]),
    "a stage of the script": ({"stage": "__main__:Stage"}, ["'__main__:Stage'", "Put the class into a file"]),
    "an unknown key": ({"n_rank": 2}, ["unknown key of a run 'n_rank'", "Did you mean 'n_ranks'?"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_it_refuses(what):
    values, said = REFUSALS[what]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - what it says is checked below
        spec(**values)
    assert isinstance(refusal.value, TerapipeError)
    missing = [part for part in said if part not in str(refusal.value)]
    assert not missing, f"{missing} not in: {refusal.value}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: tp.uniform_slicing(3, 4), ["4 slices of 3 tokens", "at most 3 slices"]),  # S22
        (lambda: tp.uniform_slicing(0, 1), ["seq_tokens=0", "at least 1"]),
        (lambda: tp.uniform_slicing(8, 2, n_sequences=0), ["n_sequences=0", "at least 1"]),
        (lambda: tp.uniform_slicing(8, 2, n_microbatches=0), ["n_microbatches=0", "at least 1"]),
        (lambda: tp.ModelConfig(4, 10, 4), ["d_model=10 is not a multiple of n_heads=4", "d_model=12"]),
        (lambda: tp.ModelConfig(4, 8, 4, n_kv_heads=3), ["n_heads=4 is not a multiple of n_kv_heads=3"]),
        (lambda: tp.ModelConfig(4, 6, 2, position="rotary"), ["d_model/n_heads=3 must be even"]),
    ],
)
def test_the_parts_of_a_run_refuse_too(wrong, said):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - what it says is checked below
        wrong()
    assert isinstance(refusal.value, TerapipeError)
    assert all(part in str(refusal.value) for part in said), refusal.value


def test_a_directory_that_holds_something_is_refused_and_an_empty_one_taken(tmp_path):
    assert spec(tmp_path).directory == tmp_path
    (tmp_path / "spec.json").touch()
    with pytest.raises(TerapipeError, match="already holds a run, which would be overwritten"):
        spec(tmp_path)


def test_what_was_refused_stays_refused_in_a_changed_copy():
    with pytest.raises(TerapipeError, match="5 stages for 4 layers"):
        spec().replaced(n_ranks=5)
    with pytest.raises(TerapipeError, match=r"'n_step'\. Did you mean 'n_steps'\?"):
        spec().replaced(n_step=5)


def test_8_sequences_in_3_microbatches_and_10_tokens_in_3_slices_are_taken_as_they_are():  # S9
    uneven = spec(slicing="[(3, [4, 3, 3]), (3, [4, 3, 3]), (2, [4, 3, 3])]")
    assert uneven.slicings[0].n_sequences == 8
    assert uneven.slicings[0].seq_tokens == 10


def test_30_layers_over_4_ranks_are_layers_0_to_29_once_each():  # S11
    deep = spec(model=tp.ModelConfig(30, 8, 2), n_ranks=4)
    assert [layer for layers in deep.layer_ranges for layer in layers] == list(range(30))
    split = spec(model=tp.ModelConfig(30, 8, 2), n_ranks=4, layers_per_stage=(6, 8, 8, 8))
    assert [len(layers) for layers in split.layer_ranges] == [6, 8, 8, 8]


def test_one_sequence_of_one_token_is_a_run():  # S22
    assert spec(slicing="[(1, [1])]").slicings[0].n_tokens == 1


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some text", "utf-8")
    return path


KINDS = {
    "defaults": {},
    "every plain value": {
        "n_ranks": 3, "layers_per_stage": [1, 2, 1], "n_steps": 7, "n_warmup_steps": 0, "dtype": "float64", "seed": 5,
        "learning_rate": 1e-2, "clip_grad_norm": 1.0,
    },
    "gpipe": {"schedule": "gpipe", "slicing": TWO},
    "1f1b": {"schedule": "1f1b", "slicing": TWO},
    "a list of slicings": {"slicing": [SLICED, "[(2, [6, 6])] * 2", tp.uniform_slicing(9, 4)]},
    "a typed schedule": schedule(*GOOD),
    "two stages a rank": {
        **schedule("0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0", "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"), "chunks_per_rank": 2,
    },
    "unlike numbers of stages": schedule("0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0", "1F0 1F1 1B1 1B0"),
    "a family of two stages a rank": {"schedule": "zbv", "slicing": TWO},
    "forwards alone": {"schedule": "forward-only"},
    "stages asked for": {"schedule": "seq1f1b-interleaved", "slicing": "[(1, [4, 4])] * 2", "chunks_per_rank": 2},
    "a family with an option": {"schedule": tp.build_schedule("svpp", 2, TWO, max_in_flight=1), "slicing": TWO},
    "a stage of one's own": {"stage": "thin_stage:ThinStage"},
    "a stage of this file": {"stage": StageOfThisFile},
    "another model": {"model": tp.ModelConfig(4, 8, 4, 2, position="rotary", activation="swiglu", norm="rmsnorm", bias=False)},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_comes_back_from_json_unchanged(kind):
    there = spec(**KINDS[kind])
    back = RunSpec.from_json(there.to_json())
    assert replace(back, slicing=there.slicing) == there
    assert back.slicings == there.slicings
    assert back.to_json() == there.to_json()
    assert [str(each) for each in back.schedules] == [str(each) for each in there.schedules]
    assert json.loads(there.to_json())["format"] == 1


def test_paths_come_back_as_text_and_the_directory_stays_behind(text_file, tmp_path):
    there = spec(tmp_path / "run", text=text_file)
    values = json.loads(there.to_json())
    assert (values["text"], values["directory"]) == (str(text_file), str(tmp_path / "run"))
    back = RunSpec.from_json(there.to_json())
    assert (back.text, back.directory) == (str(text_file), None)


@pytest.mark.parametrize("schedule_kind", ["named", "split backward"])
def test_emulated_costs_come_back_for_every_slice_of_the_run_stage_by_stage(schedule_kind):
    slow = tp.CallableCost(lambda l, c, b: l * b, lambda l, c, b: 2.0 * l + c, lambda l, c, b: l / 2)
    quick = tp.LinearContextCost((1, 12), (0.5, 6.0), (1.0, 12.0), (0, 0.01, 0.01, 0.001), (0, 0.02, 0.02, 0.002))
    orders = ("0F0.0 0F0.1 0I0.1 0I0.0 0W0.0 0W0.1", "1F0.0 1F0.1 1B0.1 1B0.0")
    split = schedule(*orders, slicing="[(2, [5, 7])]") if schedule_kind == "split backward" else {"slicing": ["[(2, [5, 7])]"]}
    there = spec(device="emulated", cost=[slow, quick], **split)
    back = RunSpec.from_json(there.to_json())
    assert back.to_json() == there.to_json()
    lengths, contexts, sequences = np.array([5, 7]), np.array([0, 5]), np.array([2, 2])
    for mine, yours in zip(there.stage_costs, back.stage_costs, strict=True):
        for name in ("forward_ms", "backward_ms", "input_ms", "weight_ms"):
            expected = getattr(mine, name)(lengths, contexts, sequences)
            assert getattr(yours, name)(lengths, contexts, sequences) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, '"format": 1'),
        ({"format": None}, '"format": 1'),
        ({"n_rank": 2}, "unknown key of a run 'n_rank'. Did you mean 'n_ranks'?"),
        ({"links": None}, "unknown key of a run 'links'. Did you mean 'link'?"),
        ({"model": {"n_layers": 4, "d_model": 8, "n_head": 2}}, "Did you mean 'n_heads'?"),
        ({"model": {**MODEL.to_dict(), "n_layer": 2}}, "unknown key of a model 'n_layer'. Did you mean 'n_layers'?"),
        ({"n_ranks": 5}, "5 stages for 4 layers"),
        ({"slicing": ["[(1, [4"]}, "is not a slicing"),
        ({"schedule": "terrapipe"}, "Did you mean 'terapipe'?"),
        ({"schedule": {"name": "custom", "orders": ["0F0.0 0B0.0", "1F0.0"]}}, "0F0.1 is missing on rank 0"),
    ],
)
def test_json_that_is_not_a_spec_is_refused(change, said):
    values = json.loads(spec().to_json()) | change
    with pytest.raises(TerapipeError) as refusal:
        RunSpec.from_json(json.dumps(values))
    assert said in str(refusal.value)


@pytest.mark.parametrize("text", ["[]", "7", "null", '{"model": {}}'])
def test_json_of_something_else_is_refused_quoting_it(text):
    with pytest.raises(TerapipeError, match="not a run spec"):
        RunSpec.from_json(text)


# Values that once got through to the ranks, or ended in an error that was not the toolkit's own.
GAPS = {
    "no learning rate": ({"learning_rate": None}, "learning_rate=None"),
    "true for a rate": ({"learning_rate": True}, "learning_rate=True"),
    "a number for the layers": ({"layers_per_stage": 3}, "layers_per_stage=3"),
    "layers as text": ({"layers_per_stage": "22"}, "layers_per_stage="),
    "broken layers": ({"layers_per_stage": [2.0, 2.0]}, "layers_per_stage="),
    "a number for the text": ({"text": 5}, "text=5"),
    "a file for the directory": ({"directory": __file__}, "directory="),
    "a number for the cost": ({"device": "emulated", "cost": 5}, "cost=5"),
    "numbers for the costs": ({"device": "emulated", "cost": [1, 2]}, "cost="),
}


@pytest.mark.parametrize("what", GAPS)
def test_it_refuses_too(what):
    values, said = GAPS[what]
    with pytest.raises(TerapipeError) as refusal:
        spec(**values)
    assert said in str(refusal.value)


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(TerapipeError, match="empty"):
        spec(text=tmp_path / "empty.txt")


@pytest.mark.parametrize("change", ["{nope", {"slicing": None}, {"schedule": {"name": "custom"}}])
def test_broken_json_is_refused_in_the_toolkits_own_words(change):
    values = json.loads(spec().to_json())
    if isinstance(change, dict):
        values |= change
    text = change if isinstance(change, str) else json.dumps({key: value for key, value in values.items() if value is not None})
    with pytest.raises(TerapipeError):
        RunSpec.from_json(text)


def test_a_class_that_ranks_can_import_becomes_its_path():
    assert stage_path(StageOfThisFile) == "test_spec:StageOfThisFile"
    assert spec(stage=StageOfThisFile).stage == "test_spec:StageOfThisFile"
    assert stage_path("thin_stage:ThinStage") == "thin_stage:ThinStage"


def test_a_class_defined_in_a_cell_is_refused_naming_it_and_the_remedy():  # S2
    defined: dict[str, type] = {}
    exec("class InACell:\n    pass\nInACell.__module__ = '__main__'", defined)
    with pytest.raises(TerapipeError) as refusal:
        spec(stage=defined["InACell"])
    assert "'InACell' is defined in a notebook cell" in str(refusal.value)
    assert "stage='my_stage:InACell'" in str(refusal.value)


@pytest.mark.parametrize(("family", "n_stages"), [("seq1f1b", 2), ("interleaved", 4), ("zbv", 4), ("zb-h1", 2)])
def test_the_stages_of_a_run_are_those_of_its_family(family, n_stages):
    there = spec(schedule=family, slicing=TWO)
    assert (there.n_stages, there.chunks_per_rank) == (n_stages, None)
    assert [len(layers) for layers in there.layer_ranges] == [4 // n_stages] * n_stages
    assert there.replaced(schedule="1f1b").n_stages == 2
