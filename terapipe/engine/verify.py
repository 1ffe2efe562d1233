"""The run against one process, unsliced: are its gradients exact?"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm.auto import tqdm

from terapipe.engine.launch import Ranks, launch_groups
from terapipe.engine.rank import step_inputs
from terapipe.engine.reference import build_reference, reference_step, train_reference
from terapipe.engine.results import load_run, prepare
from terapipe.errors import SpecError
from terapipe.spec import RunSpec

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
# A key bias's true gradient is 0: below this share of the largest gradient, a relative error
# compares rounding with rounding.
FLOOR = 1e-3

Arrays = Mapping[str, npt.NDArray[np.generic]]


def verify(specs: RunSpec | Sequence[RunSpec], what: Literal["gradients", "parameters"] = "gradients") -> pd.DataFrame:
    """Run specs on real ranks and compare with one process, unsliced and unpipelined.

    Parameters
    ----------
    specs : RunSpec or list of RunSpec
        Specs that share the number of ranks run in one launch.
    what : "gradients" or "parameters"
        Every gradient of one step for each slicing of the run (nothing is updated in between), only the
        loss where its schedule has forwards alone; or every parameter after all of the run's steps of AdamW
        with clipping.

    Returns
    -------
    DataFrame
        spec (its place in the list), name, max_relative_error = max|Δ| ÷ max(max|reference|,
        10⁻³ · the largest of the whole model); one row a tensor and copy, and one for "loss".
        `attrs["tolerance"]` holds what each spec's dtype allows.
    """
    several = [specs] if isinstance(specs, RunSpec) else list(specs)
    if what not in ("gradients", "parameters"):
        raise SpecError(f"what={what!r}: allowed are 'gradients' and 'parameters'.")
    if any(spec.device == "emulated" for spec in several):
        raise SpecError("an emulated run computes nothing, so there is nothing to verify. Use device='cpu'.")
    if what == "parameters" and not all(spec.trains for spec in several):
        raise SpecError("what='parameters': a schedule of forwards alone trains nothing. Use what='gradients', for its loss.")
    if what == "gradients":
        several = [spec.replaced(n_warmup_steps=0, n_steps=len(spec.slicings)) for spec in several]
    root = Path(tempfile.mkdtemp(prefix="terapipe-verify-"))  # kept where a rank fails: its log is there
    rows: list[pd.DataFrame] = []
    with tqdm(total=len(several), unit="spec", delay=2, leave=False, desc="verify") as bar:
        for indices in launch_groups(several):
            directories = [prepare(several[index], root / str(index)) for index in indices]
            with Ranks(several[indices[0]].n_ranks, root) as ranks:
                ranks.train(directories, save=what)
            for index, directory in zip(indices, directories, strict=True):
                compare = _compare_gradients if what == "gradients" else _compare_parameters
                rows.append(compare(several[index], directory).assign(spec=index))
                bar.update()
    shutil.rmtree(root)
    report = pd.concat(rows, ignore_index=True).sort_values("spec", kind="stable", ignore_index=True)
    report = report[["spec", "name", "max_relative_error"]].fillna({"max_relative_error": float("inf")})  # a loss of NaN
    report.attrs["tolerance"] = [TOLERANCE[spec.dtype] for spec in several]
    return report


def _compare_gradients(spec: RunSpec, directory: Path) -> pd.DataFrame:
    """Every gradient and the loss, for one step of each slicing."""
    losses = load_run(directory).losses.set_index("step")["loss"]
    module = build_reference(spec)
    tables = []
    for step in range(spec.n_steps):
        module.zero_grad()
        loss = reference_step(module, step_inputs(spec, step))
        table = pd.DataFrame(columns=["name", "max_relative_error"])
        if spec.trains:
            expected = {name: _gradient(parameter) for name, parameter in module.named_parameters()}
            table = _errors(expected, directory, f"gradients-{step}", spec.n_ranks)
        table.loc[len(table)] = ["loss", abs(losses[step] - loss) / abs(loss)]
        tables.append(table.assign(name=f"step {step}: " + table["name"]) if spec.n_steps > 1 else table)
    return pd.concat(tables, ignore_index=True)


def _compare_parameters(spec: RunSpec, directory: Path) -> pd.DataFrame:
    """Every parameter after training, and the last loss."""
    module, loss = train_reference(spec)
    expected = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    table = _errors(expected, directory, "parameters", spec.n_ranks)
    table.loc[len(table)] = ["loss", abs(load_run(directory).losses["loss"].iloc[-1] - loss) / abs(loss)]
    return table


def _gradient(parameter: torch.Tensor) -> npt.NDArray[np.generic]:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # unused: no gradient is 0
    return gradient.numpy()


def _errors(expected: Arrays, directory: Path, label: str, n_ranks: int) -> pd.DataFrame:
    """Relative error of every tensor that any rank holds; a tensor that no rank holds is infinitely wrong."""
    floor = FLOOR * max(float(np.abs(value).max()) for value in expected.values())
    rows = []
    missing = set(expected)
    for rank in range(n_ranks):
        with np.load(directory / f"{label}-rank-{rank}.npz", allow_pickle=False) as held:
            for name in held.files:
                reference = expected[name]
                error = float(np.abs(held[name] - reference).max()) / max(float(np.abs(reference).max()), floor)
                # NaN is skipped by max() and compares as false: it must be the largest error there is.
                rows.append((name, float("inf") if np.isnan(error) else error))
                missing.discard(name)
    rows += [(name, float("inf")) for name in sorted(missing)]
    return pd.DataFrame(rows, columns=["name", "max_relative_error"])
