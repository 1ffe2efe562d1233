"""A profile: the table of measured slice times, its noise, and the cost models fitted to it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from terapipe.cost.linear import LinearContextCost, context_features, fit_context
from terapipe.cost.table import TableCost
from terapipe.errors import CostError

POINT = ["stage", "slice_tokens", "context_tokens", "n_sequences"]
_COLUMNS = [*POINT, "together", "repeat", "forward_ms", "backward_ms"]


@dataclass(frozen=True)
class Profile:
    """Measured times of each stage's slices.

    Parameters
    ----------
    frame : DataFrame
        One row a repeat: stage, slice_tokens, context_tokens, n_sequences, together (False: the
        other ranks were idle; True: all ranks computed at once), repeat, forward_ms, backward_ms.
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

    def medians(self, stage: int | None = None, together: bool = False) -> pd.DataFrame:
        """Median times a point: of one stage, or the mean over all stages."""
        rows = self.frame[self.frame["together"] == together]
        if stage is not None:
            if stage not in set(rows["stage"]):
                raise CostError(f"stage {stage} was not measured; measured: {sorted(set(rows['stage']))}.")
            rows = rows[rows["stage"] == stage]
        each = rows.groupby(POINT, as_index=False)[["forward_ms", "backward_ms"]].median()
        return each.groupby(POINT[1:], as_index=False)[["forward_ms", "backward_ms"]].mean()

    def table(self, stage: int | None = None) -> TableCost:
        """The medians as a cost model: exact at measured points, linear between them."""
        return TableCost(self.medians(stage))

    def fit(self, stage: int | None = None, exclude: npt.NDArray[np.bool_] | None = None) -> LinearContextCost:
        """Eq. (9) fitted to one stage, or to the mean over stages.

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
        for kind in ("forward", "backward"):
            own = np.interp(lengths, alone["slice_tokens"], alone[f"{kind}_ms"])
            fitted[kind] = fit_context(lengths, before, behind[f"{kind}_ms"].to_numpy(np.float64) - own)
        return LinearContextCost(
            slice_tokens=tuple(int(value) for value in alone["slice_tokens"]),
            forward_alone_ms=tuple(float(value) for value in alone["forward_ms"]),
            backward_alone_ms=tuple(float(value) for value in alone["backward_ms"]),
            forward_context=fitted["forward"],
            backward_context=fitted["backward"],
            n_sequences=int(points["n_sequences"].iloc[0]),
        )

    def held_out_error(self, stage: int | None = None, n_folds: int = 4) -> pd.DataFrame:
        """Relative error of the fit at points it has not seen, beside the noise of repeats.

        Points behind a context are dealt into `n_folds`; each fold is predicted by a fit to the
        others. Columns: kind, median, p95 (held-out relative error), noise (median over points of
        half the interquartile range of repeats ÷ their median).
        """
        points = self.medians(stage)
        behind = np.flatnonzero(points["context_tokens"] > 0)
        dealt = np.random.default_rng(0).permutation(behind)
        errors: dict[str, list[float]] = {"forward": [], "backward": []}
        for fold in range(n_folds):
            exclude = np.zeros(len(points), dtype=bool)
            exclude[dealt[fold::n_folds]] = True
            fit, held = self.fit(stage, exclude), points[exclude]
            where = (held["slice_tokens"].to_numpy(), held["context_tokens"].to_numpy(), fit.n_sequences)
            for kind, predicted in (("forward", fit.forward_ms(*where)), ("backward", fit.backward_ms(*where))):
                measured = held[f"{kind}_ms"].to_numpy(np.float64)
                errors[kind].extend(np.abs(predicted / measured - 1))
        noise = self._noise(stage)
        return pd.DataFrame(
            [(kind, np.median(found), np.quantile(found, 0.95), noise[kind]) for kind, found in errors.items()],
            columns=["kind", "median", "p95", "noise"],
        )

    def _noise(self, stage: int | None) -> dict[str, float]:
        rows = self.frame[~self.frame["together"]]
        rows = rows if stage is None else rows[rows["stage"] == stage]
        groups = rows.groupby(POINT)[["forward_ms", "backward_ms"]]
        spread = (groups.quantile(0.75) - groups.quantile(0.25)) / 2 / groups.median()
        return {kind: float(spread[f"{kind}_ms"].median()) for kind in ("forward", "backward")}

    def contention_ratios(self) -> npt.NDArray[np.float64]:
        """Time with all ranks computing at once ÷ time alone, a value for each point measured both ways."""
        alone, together = (
            self.frame[self.frame["together"] == both].groupby(POINT)[["forward_ms", "backward_ms"]].median()
            for both in (False, True)
        )
        both_ways = together.index.intersection(alone.index)
        if both_ways.empty:
            raise CostError("this profile has no points measured with all ranks at once; contention is unknown.")
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
