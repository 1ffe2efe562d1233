"""Random cost tables of every kind that a slicing DP must survive, and the exhaustive search over their slicings."""

import math
import random
from collections.abc import Iterator
from itertools import combinations_with_replacement

import numpy as np
from reference import compositions

import terapipe as tp

Cut = tuple[int, tuple[int, ...]]  # sequences of a microbatch, slice lengths


class Table:
    """Forward and backward time of every (slice, context, sequences), drawn at random."""

    def __init__(self, seq_tokens: int, rng: random.Random, batch_sequences: int = 1) -> None:
        draws = [
            lambda length: rng.choice([0.0, 1.0, 1.0, 2.0, 3.0]),  # ties and zeros
            lambda length: rng.choice([0.5, 1.0, 4.0, math.inf]),  # forbidden slices
            lambda length: rng.uniform(0, 9),  # in any order: a cost need not rise with length
            lambda length: 10 ** rng.uniform(-6, 6),
            lambda length: length + rng.choice([0.1, 0.5]) + 1e-7 * rng.random(),  # in proportion to tokens, but for a hair
        ]
        self.forward, self.backward = (
            np.array(
                [
                    [[draw(length) for _ in range(seq_tokens)] for length in range(seq_tokens + 1)]
                    for _ in range(batch_sequences + 1)
                ]
            )
            for draw in (rng.choice(draws), rng.choice(draws))
        )
        self.cost = tp.CallableCost(
            lambda l, c, b: self.forward[b, np.asarray(l), np.asarray(c)],
            lambda l, c, b: self.backward[b, np.asarray(l), np.asarray(c)],
        )

    def latency(self, cuts: tuple[Cut, ...], n_stages: int, objective: str) -> float:
        """By the definitions, over the slices of all microbatches."""
        points = [(size, length, sum(cut[:place])) for size, cut in cuts for place, length in enumerate(cut)]
        forward, backward = ([float(table[point]) for point in points] for table in (self.forward, self.backward))
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        slowest = max(both) if objective == "paper" else max(forward) + max(backward)
        return sum(both) + ((n_stages - 1) * slowest if n_stages > 1 else 0.0)

    def least(self, seq_tokens: int, n_stages: int, objective: str, granularity: int = 1, shortest: int = 1) -> float:
        """The least latency of one sequence over all its slicings."""
        allowed = (
            tuple(granularity * length for length in lengths)
            for lengths in compositions(seq_tokens // granularity)
            if granularity * min(lengths) >= shortest
        )
        return min((self.latency(((1, lengths),), n_stages, objective) for lengths in allowed), default=math.inf)


def batches(n_sequences: int, cuts: list[tuple[int, ...]], largest: int | None = None) -> Iterator[tuple[Cut, ...]]:
    """Every way to split a batch into microbatches, and to cut each: microbatches in any one order."""
    if n_sequences == 0:
        yield ()
    for size in range(1, min(n_sequences, largest or n_sequences) + 1):
        for count in range(1, n_sequences // size + 1):
            for rest in (
                batches(n_sequences - count * size, cuts, size - 1) if size > 1 else _nothing(n_sequences - count * size)
            ):
                for chosen in combinations_with_replacement(cuts, count):
                    yield tuple((size, cut) for cut in chosen) + rest


def _nothing(left: int) -> Iterator[tuple[Cut, ...]]:
    if left == 0:
        yield ()
