"""Better slicings from a given one: boundaries moved, slices split and merged, as long as that helps.

Deterministic: of all moves of one size the best is taken, and the effort is counted in actions
timed, not in seconds.
"""

from collections.abc import Iterable

import numpy as np

from terapipe.errors import ScheduleError
from terapipe.search.problem import Problem
from terapipe.search.replay import Floats, Indices, Replay

OVER_CAP = 1e200  # scores of slicings that do not fit: after all that do, the least peak first
MAX_TIMED_ACTIONS = 600_000_000  # of all climbs of a search: a second or two
MAX_PAIRED_SLICES = 16  # up to here tokens move between any two slices, beyond only between neighbours
RELATIVE_GAIN = 1e-12  # less is rounding


class Climber:
    """Scores slicings, given as lengths in tokens, and improves them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.n_evaluated = self.n_timed = 0
        self._replays: dict[int, Replay | ScheduleError] = {}

    def replay(self, n_slices: int) -> Replay:
        """The family's orders for a number of slices; `ScheduleError` where the family refuses it."""
        if n_slices not in self._replays:
            try:
                self._replays[n_slices] = Replay(
                    self.problem.family, self.problem.n_ranks, self.problem.n_microbatches, n_slices
                )
            except ScheduleError as refused:
                self._replays[n_slices] = refused
        found = self._replays[n_slices]
        if isinstance(found, ScheduleError):
            raise found
        return found

    def accepts(self, n_slices: int) -> bool:
        """Whether the caller and the family allow this number of slices."""
        allowed = n_slices == self.problem.n_slices if self.problem.n_slices else 1 <= n_slices <= self.problem.most_slices
        if allowed:
            try:
                self.replay(n_slices)
            except ScheduleError:
                return False
        return allowed

    def scores(self, lengths: Indices) -> Floats:
        """Makespan in ms of slicings with equally many slices, one a row; from `OVER_CAP` on those above the cap.

        Infinite with a forbidden slice, whatever it needs: no cap makes it allowed.
        """
        replay = self.replay(lengths.shape[1])
        self.n_evaluated += len(lengths)
        self.n_timed += len(lengths) * replay.n_actions
        makespans = replay.makespans_ms(*self.problem.times_ms(lengths))
        cap = self.problem.memory_cap_bytes
        if self.problem.memory is None or cap is None:
            return makespans
        peaks = replay.peak_bytes(self.problem.memory, lengths)
        return np.where((peaks > cap) & np.isfinite(makespans), OVER_CAP * peaks / cap, makespans)

    def climb(self, lengths: Indices) -> tuple[Indices, float]:
        """Move boundaries, then split and merge slices, until neither helps."""
        lengths, score = self._move(lengths, float(self.scores(lengths[np.newaxis])[0]))
        while self.n_timed < MAX_TIMED_ACTIONS:
            found = [self._best(moves) for moves in (self._splits(lengths), self._merges(lengths)) if len(moves)]
            if not found:
                break
            other, _ = min(found, key=lambda each: each[1])
            other, other_score = self._move(other, float(self.scores(other[np.newaxis])[0]))
            if not other_score < score * (1 - RELATIVE_GAIN):
                break
            lengths, score = other, other_score
        return lengths, score

    def _move(self, lengths: Indices, score: float) -> tuple[Indices, float]:
        """Move tokens between slices: as many as half the mean slice at first, a single grid cell at last."""
        cells = max(1, self.problem.n_units // (2 * len(lengths)))
        while len(lengths) > 1 and self.n_timed < MAX_TIMED_ACTIONS:
            moves = self._transfers(lengths, cells * self.problem.grid.granularity_tokens)
            best, best_score = self._best(moves) if len(moves) else (lengths, score)
            if best_score < score * (1 - RELATIVE_GAIN):
                lengths, score = best, best_score
            elif cells == 1:
                break
            else:
                cells //= 2
        return lengths, score

    def _best(self, moves: Indices) -> tuple[Indices, float]:
        scores = self.scores(moves)
        best = int(scores.argmin())
        return moves[best], float(scores[best])

    def _transfers(self, lengths: Indices, n_tokens: int) -> Indices:
        """`n_tokens` from one slice to another."""
        n = len(lengths)
        source, target = np.nonzero(~np.eye(n, dtype=bool))
        if n > MAX_PAIRED_SLICES:
            near = abs(source - target) == 1
            source, target = source[near], target[near]
        moves = np.tile(lengths, (len(source), 1))
        at = np.arange(len(source))
        moves[at, source] -= n_tokens
        moves[at, target] += n_tokens
        return moves[(moves >= self._shortest).all(axis=1)]

    def _splits(self, lengths: Indices) -> Indices:
        """Each slice cut into halves on the grid."""
        if not self.accepts(len(lengths) + 1):
            return np.empty((0, 0), dtype=np.int64)
        granularity = self.problem.grid.granularity_tokens
        halves = ((index, length // granularity // 2 * granularity) for index, length in enumerate(lengths))
        cut = [np.concatenate([lengths[:i], [half, lengths[i] - half], lengths[i + 1 :]]) for i, half in halves]
        return self._long_enough(cut)

    def _merges(self, lengths: Indices) -> Indices:
        """Each slice joined with the next."""
        if not self.accepts(len(lengths) - 1):
            return np.empty((0, 0), dtype=np.int64)
        return self._long_enough(
            np.concatenate([lengths[:i], [lengths[i] + lengths[i + 1]], lengths[i + 2 :]]) for i in range(len(lengths) - 1)
        )

    def _long_enough(self, slicings: Iterable[Indices]) -> Indices:
        kept = [lengths for lengths in slicings if lengths.min() >= self._shortest]
        return np.array(kept, dtype=np.int64) if kept else np.empty((0, 0), dtype=np.int64)

    @property
    def _shortest(self) -> int:
        return self.problem.min_units * self.problem.grid.granularity_tokens
