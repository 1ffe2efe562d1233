"""What may import what: planning and simulating need no torch, no plotly, and no reader's patience."""

import ast
import doctest
import json
import pkgutil
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import terapipe as tp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "terapipe"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NEEDS_TORCH = ("terapipe.engine", "terapipe.profiling", "terapipe.__main__")

PLAN_AND_SIMULATE = """
import terapipe as tp
cost = tp.CallableCost(lambda l, c, b: 1.0 + l, lambda l, c, b: 2.0 * l)
plan = tp.optimal_slicing(cost, 32, 4)
timeline = tp.simulate(tp.build_schedule("terapipe", 4, plan.slicing), cost, tp.Link(0.0))
assert abs(timeline.makespan_ms - plan.latency_ms) < 1e-9
assert tp.Timeline.from_frame(timeline.frame).budget().sum() > 0
assert tp.ModelConfig.preset("gpt3-1b").n_layers == 24
"""


def fresh(code: str, cwd: Path) -> str:
    """Run code in a new interpreter, away from the repository; what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_terapipe_loads_neither_torch_nor_plotly_nor_pandas(tmp_path):
    loaded = json.loads(fresh("import json, sys, terapipe; print(json.dumps(sorted(sys.modules)))", tmp_path))
    assert not {"torch", "plotly", "pandas", "numpy", "scipy", "ipywidgets"} & set(loaded)
    assert [name for name in loaded if name.startswith("terapipe")] == ["terapipe"]


def test_importing_terapipe_leaves_cuda_uninitialised(tmp_path):  # S1
    assert fresh("import terapipe, torch; print(torch.cuda.is_initialized())", tmp_path).strip() == "False"


def test_planning_and_simulating_load_neither_torch_nor_plotly(tmp_path):
    code = PLAN_AND_SIMULATE + "import sys; print([name for name in ('torch', 'plotly', 'ipywidgets') if name in sys.modules])"
    assert fresh(code, tmp_path).strip() == "[]"


@pytest.mark.parametrize("absent", ["torch", "plotly", "ipywidgets"])
def test_planning_and_simulating_work_where_it_is_not_installed(absent, tmp_path):
    fresh(f"import sys; sys.modules[{absent!r}] = None\n" + PLAN_AND_SIMULATE, tmp_path)


def test_the_layers_of_the_import_linter_contracts_hold():
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if command is None:
        pytest.skip("import-linter is not installed; it comes with the extra 'dev'")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(tp.__all__))
def test_every_public_name_is_there_and_listed(name):
    assert getattr(tp, name) is not None
    assert name in dir(tp)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'optimal_slicng'"):
        _ = tp.optimal_slicng


def public_definitions(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Functions and classes without a leading underscore, and the methods of such classes."""
    found = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            found.append((node.name, node))
            members = node.body if isinstance(node, ast.ClassDef) else []
            found += [
                (f"{node.name}.{member.name}", member)
                for member in members
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_")
            ]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_a_module_and_its_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text("utf-8"))
    bare = [name for name, node in public_definitions(tree) if not ast.get_docstring(node)]
    assert ast.get_docstring(tree), "the module has no docstring"
    assert not bare, f"without docstring: {bare}"


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_no_module_is_longer_than_400_lines(path):
    assert path.read_text("utf-8").count("\n") <= 400


def torch_free_modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "terapipe.", onerror=lambda name: None)]
    return [name for name in names if not name.startswith(NEEDS_TORCH)]


@pytest.mark.parametrize("name", torch_free_modules())
def test_the_examples_in_the_docstrings_are_true(name):
    assert doctest.testmod(import_module(name)).failed == 0
