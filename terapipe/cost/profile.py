"""A profile: the table of measured slice times, its noise, and the cost models fitted to it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.cost.linear import Coefficients, LinearContextCost, context_features, fit_plane
from terapipe.cost.table import TableCost
from terapipe.errors import CostError

POINT = ["stage", "slice_tokens", "context_tokens", "n_sequences"]
_WHOLE, _HALVES = ("forward", "backward"), ("input", "weight")
_COLUMNS = [*POINT, "together", "repeat", "forward_ms", "backward_ms"]
_N_PARAMETERS = {"forward": 4, "backward": 4, "input": 4, "weight": 0}  # a weight gradient has no context part to fit


def median_error(times_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Relative standard error of the medians over repeats (first axis of (n_repeats, n_kinds)).

    1.2533·σ/√n ÷ median, which holds for normal noise; σ is the interquartile range ÷ 1.349, so that
    an outlier does not set it. Repeats are taken as independent. One repeat says nothing: infinite.
    """
    if len(times_ms) < 2:
        return np.full(times_ms.shape[1:], np.inf)
    # numpy's own quartiles of five samples lie too close together
    low, middle, high = np.quantile(times_ms, [0.25, 0.5, 0.75], axis=0, method="median_unbiased")
    error = 1.2533 * (high - low) / 1.349 / np.sqrt(len(times_ms))
    # a stage without linear layers has weight gradients that take no time at all
    relative: npt.NDArray[np.float64] = np.divide(error, middle, out=np.where(error > 0, np.inf, 0.0), where=middle > 0)
    return relative


@dataclass(frozen=True)
class Profile:
    """Measured times of each stage's slices.

    Parameters
    ----------
    frame : DataFrame
        One row a repeat: stage, slice_tokens, context_tokens, n_sequences, together (False: the
        other ranks were idle; True: all ranks computed at once), repeat, forward_ms, backward_ms, and
        where the halves of the backward were measured, input_ms and weight_ms. Their sum differs from
        the backward's time by what running it in two halves costs.
    about : dict
        Where it was measured: machine, versions, threads, model.
    """

    frame: pd.DataFrame
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [name for name in _COLUMNS if name not in self.frame]
        if missing:
            raise CostError(f"a profile needs the column(s) {missing}; given: {list(self.frame.columns)}.")

    @property
    def n_stages(self) -> int:
        """Number of stages measured."""
        return int(self.frame["stage"].nunique())

    @property
    def kinds(self) -> tuple[str, ...]:
        """What was measured: "forward", "backward", and "input", "weight" where the backward's halves were too."""
        return _WHOLE + (_HALVES if all(f"{kind}_ms" in self.frame for kind in _HALVES) else ())

    @property
    def _times(self) -> list[str]:
        return [f"{kind}_ms" for kind in self.kinds]

    def medians(self, stage: int | None = None, together: bool = False) -> pd.DataFrame:
        """Median times a point: of one stage, or the mean over all stages."""
        rows = self.frame[self.frame["together"] == together]
        if stage is not None:
            if stage not in set(rows["stage"]):
                raise CostError(f"stage {stage} was not measured; measured: {sorted(set(rows['stage']))}.")
            rows = rows[rows["stage"] == stage]
        each = rows.groupby(POINT, as_index=False)[self._times].median()
        return each.groupby(POINT[1:], as_index=False)[self._times].mean()

    def table(self, stage: int | None = None) -> TableCost:
        """The medians as a cost model: exact at measured points, linear between them."""
        return TableCost(self.medians(stage))

    def fit(self, stage: int | None = None, exclude: npt.NDArray[np.bool_] | None = None) -> LinearContextCost:
        """Eq. (9) fitted to one stage, or to the mean over stages.

        t(l, 0) is the median at each length; a0…a3 have the least squared error relative to the
        slices' whole times, so that short slices count as much as long ones. Where the halves of
        the backward were measured, the input gradient's time is fitted likewise; the weight gradient's
        depends on the length alone, as attention has none: the mean over its contexts.

        `exclude` marks rows of `medians(stage)` to leave out of the context part.
        """
        points = self.medians(stage)
        if len(set(points["n_sequences"])) != 1:
            raise CostError(
                f"the profile holds n_sequences {sorted(points['n_sequences'].unique())}; eq. (9) is fitted to one. "
                "Use profile.table(), or profile one number of sequences."
            )
        alone = points[points["context_tokens"] == 0].sort_values("slice_tokens")
        if alone.empty:
            raise CostError("the profile has no slice without context; eq. (9) needs t(l, 0). Measure context_tokens=0 too.")
        used = points if exclude is None else points[~exclude]
        behind = used[(used["context_tokens"] > 0) & used["slice_tokens"].isin(alone["slice_tokens"])]
        lengths = behind["slice_tokens"].to_numpy(np.float64)
        before = behind["context_tokens"].to_numpy(np.float64)
        if np.linalg.matrix_rank(context_features(lengths, before)) < 4:
            raise CostError(
                f"{len(behind)} points behind a context do not determine a0…a3 of eq. (9). "
                "Measure two slice lengths or more, each behind two contexts or more, or use profile.table()."
            )
        fitted = {}
        for kind in self.kinds:
            if kind == "weight":
                continue
            own = np.interp(lengths, alone["slice_tokens"], alone[f"{kind}_ms"])
            total = behind[f"{kind}_ms"].to_numpy(np.float64)
            fitted[kind] = fit_plane(lengths, before, total - own, total)
        return LinearContextCost(
            slice_tokens=tuple(int(value) for value in alone["slice_tokens"]),
            forward_alone_ms=tuple(float(value) for value in alone["forward_ms"]),
            backward_alone_ms=tuple(float(value) for value in alone["backward_ms"]),
            forward_context=fitted["forward"],
            backward_context=fitted["backward"],
            n_sequences=int(points["n_sequences"].iloc[0]),
            seq_tokens=int((lengths + before).max()),
            **({} if self.kinds == _WHOLE else _halves(alone, used, fitted["input"])),
        )

    def held_out_points(self, stage: int | None = None, n_folds: int = 4) -> pd.DataFrame:
        """Every point behind a context as a fit predicts it that has not seen it, beside what was measured.

        The points are dealt into `n_folds`; each fold is predicted by a fit to the others. A row for
        each of the `kinds` of a point: kind, slice_tokens, context_tokens, n_sequences, predicted_ms,
        measured_ms, noise (half the interquartile range of repeats ÷ their median; over several
        stages their mean).
        """
        points = self.medians(stage).set_index(POINT[1:])
        noise = self._noise(stage).groupby(POINT[1:]).mean()
        dealt = np.random.default_rng(0).permutation(np.flatnonzero(points.index.get_level_values("context_tokens") > 0))
        tables = []
        for fold in range(n_folds):
            exclude = np.zeros(len(points), dtype=bool)
            exclude[dealt[fold::n_folds]] = True
            if not exclude.any():
                continue
            fit, held = self.fit(stage, exclude), points[exclude].reset_index()
            for kind in self.kinds:
                predicted = getattr(fit, f"{kind}_ms")(*(held[name].to_numpy() for name in POINT[1:]))
                found = held[POINT[1:]].assign(kind=kind, predicted_ms=predicted, measured_ms=held[f"{kind}_ms"])
                tables.append(found.assign(noise=noise.loc[points.index[exclude], f"{kind}_ms"].to_numpy()))
        columns = ["kind", *POINT[1:], "predicted_ms", "measured_ms", "noise"]
        found = pd.concat(tables)[columns].sort_values(columns[1:4], ignore_index=True)
        return pd.concat([found[found["kind"] == kind] for kind in self.kinds], ignore_index=True)

    def held_out_error(self, stage: int | None = None, n_folds: int = 4) -> pd.DataFrame:
        """Relative error of the fit at points it has not seen (`held_out_points`), beside the noise of repeats.

        Columns: kind, median, p95 (held-out relative error), noise (median of the noise of all points).
        """
        found = self.held_out_points(stage, n_folds)
        errors = (found["predicted_ms"] / found["measured_ms"] - 1).abs().groupby(found["kind"], sort=False)
        noise = self._noise(stage).median()
        return pd.DataFrame(
            {
                "kind": self.kinds,
                "median": [errors.median()[kind] for kind in self.kinds],
                "p95": [errors.quantile(0.95)[kind] for kind in self.kinds],
                "noise": [noise[f"{kind}_ms"] for kind in self.kinds],
            }
        )

    def report(self, stage: int | None = None) -> pd.DataFrame:
        """How far to trust the fit: its error at points it has not seen, beside the noise of what it was fitted to.

        One row for each of the `kinds`. median, p95: relative error of held-out points (see
        `held_out_error`). noise, noise_p95: median and 95th percentile over points of half the
        interquartile range of repeats ÷ their median. median_error: 90th percentile over points of
        the relative standard error of the medians (see `median_error`). n_repeats: of every point at
        least. n_points, n_parameters: points behind a context, and coefficients fitted to them.
        """
        points, noise = self.medians(stage), self._noise(stage)
        repeats = [rows[self._times].to_numpy() for _, rows in self._alone(stage).groupby(POINT)]
        settled = np.quantile([median_error(times) for times in repeats], 0.9, axis=0, method="inverted_cdf")
        return (
            self.held_out_error(stage)
            .set_index("kind")
            .assign(
                noise_p95=noise.quantile(0.95).to_numpy(),
                median_error=settled,
                n_repeats=min(map(len, repeats)),
                n_points=int((points["context_tokens"] > 0).sum()),
                n_parameters=[_N_PARAMETERS[kind] for kind in self.kinds],
            )
        )

    def _alone(self, stage: int | None) -> pd.DataFrame:
        rows = self.frame[~self.frame["together"]]
        return rows if stage is None else rows[rows["stage"] == stage]

    def _noise(self, stage: int | None) -> pd.DataFrame:
        """Half the interquartile range of repeats ÷ their median, a row a point."""
        groups = self._alone(stage).groupby(POINT)[self._times]
        return (groups.quantile(0.75) - groups.quantile(0.25)) / 2 / groups.median()

    def contention_ratios(self) -> npt.NDArray[np.float64]:
        """Time with all ranks computing at once ÷ time alone, a value for each point measured both ways."""
        alone, together = (
            self.frame[self.frame["together"] == both].groupby(POINT)[["forward_ms", "backward_ms"]].median()
            for both in (False, True)
        )
        both_ways = together.index.intersection(alone.index)
        if both_ways.empty:
            raise CostError(
                "this profile has no points measured with all ranks at once; contention is unknown. "
                "Profile with n_ranks=2 or more, which measures some points on all ranks at once."
            )
        ratios: npt.NDArray[np.float64] = (together.loc[both_ways].sum(axis=1) / alone.loc[both_ways].sum(axis=1)).to_numpy()
        return ratios

    @property
    def contention_raw(self) -> float:
        """Median contention ratio as measured; below 1 it is noise."""
        return float(np.median(self.contention_ratios()))

    @property
    def contention(self) -> float:
        """How many times longer a slice takes while the other ranks compute too; at least 1."""
        return max(1.0, self.contention_raw)

    def joined(self, other: "Profile") -> "Profile":
        """This profile with the repeats of another measurement of the same stages added."""
        later = other.frame.assign(repeat=other.frame["repeat"] + self.frame["repeat"].max() + 1)
        return Profile(pd.concat([self.frame, later], ignore_index=True), self.about)

    def save(self, path: str | Path) -> Path:
        """Write the table as CSV, and what it is about as JSON beside it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.frame.to_csv(path, index=False)
        path.with_suffix(".json").write_text(json.dumps(self.about, indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read what `save` wrote."""
        path = Path(path)
        if not path.exists():
            raise CostError(f"no profile at {path}; write one with Profile.save.")
        about = path.with_suffix(".json")
        return cls(pd.read_csv(path), json.loads(about.read_text("utf-8")) if about.exists() else {})


def _halves(alone: pd.DataFrame, points: pd.DataFrame, input_context: Coefficients) -> dict[str, Any]:
    """The fields of a fit that say what the backward's halves cost."""
    weights = points.groupby("slice_tokens")["weight_ms"].mean()[alone["slice_tokens"]]
    return {
        "weight_alone_ms": tuple(map(float, weights)),
        "input_alone_ms": tuple(map(float, alone["input_ms"])),
        "input_context": input_context,
    }
