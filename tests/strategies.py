"""Random slicings and random legal schedules, for the property tests."""

import random
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from reference import inputs, split

from terapipe.slicing import MicrobatchSlices, Slicing

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


def cut(rng: random.Random, total: int, n_slices: int) -> tuple[int, ...]:
    """`total` tokens in `n_slices` random slices."""
    ends = [0, *sorted(rng.sample(range(1, total), n_slices - 1)), total]
    return tuple(end - start for start, end in pairwise(ends))


def random_slicing(rng: random.Random, max_tokens: int, max_microbatches: int, max_slices: int) -> Slicing:
    """Any number of microbatches of any number of sequences, each cut on its own, with runs of equal ones."""
    total = rng.randint(1, max_tokens)
    microbatches: list[MicrobatchSlices] = []
    while not microbatches or (len(microbatches) < max_microbatches and rng.random() < 0.8):
        if microbatches and rng.random() < 0.5:
            microbatches.append(microbatches[-1])
            continue
        n_slices = rng.randint(1, min(total, max_slices))
        microbatches.append(MicrobatchSlices(rng.randint(1, 3), cut(rng, total, n_slices)))
    return Slicing(tuple(microbatches))


def random_orders(rng: random.Random, slicing: Slicing, homes: Sequence[int], split_share: float) -> list[list[str]]:
    """A legal order for every rank, drawn action by action from those that may come next.

    `homes` is the rank of each stage, `split_share` how often a slice's backward is I and W.
    """
    actions: set[str] = set()
    for stage in range(len(homes)):
        for microbatch, each in enumerate(slicing.microbatches):
            for place in range(each.n_slices):
                kinds = "FIW" if rng.random() < split_share else "FB"
                actions |= {f"{stage}{kind}{microbatch}.{place}" for kind in kinds}
    n_missing = {text: sum(need in actions for need in inputs(text)) for text in sorted(actions)}
    needing: dict[str, list[str]] = {text: [] for text in n_missing}
    for text in n_missing:
        for need in inputs(text):
            if need in actions:
                needing[need].append(text)
    ready = [text for text, n in n_missing.items() if n == 0]
    orders: list[list[str]] = [[] for _ in range(max(homes) + 1)]
    while ready:
        text = ready.pop(rng.randrange(len(ready)))
        orders[homes[split(text)[0]]].append(text)
        for follower in needing[text]:
            n_missing[follower] -= 1
            ready += [follower] if n_missing[follower] == 0 else []
    return orders


def random_homes(rng: random.Random, n_ranks: int, max_chunks: int) -> list[int]:
    """The rank of each stage: at least one on every rank, on average at most `max_chunks`."""
    homes = list(range(n_ranks)) + [rng.randrange(n_ranks) for _ in range(rng.randint(0, n_ranks * (max_chunks - 1)))]
    rng.shuffle(homes)
    return homes


@st.composite
def slicings(draw: st.DrawFn, max_tokens: int = 40, max_microbatches: int = 5, max_slices: int = 8) -> Slicing:
    """Random slicings, as `random_slicing` makes them."""
    return random_slicing(random.Random(draw(st.integers(0, 2**32))), max_tokens, max_microbatches, max_slices)


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 4, max_chunks: int = 2) -> tuple[list[list[str]], Slicing]:
    """Orders of a legal schedule: stages on random ranks, B or I and W at random, any topological order."""
    slicing = draw(slicings(max_tokens=8, max_microbatches=3, max_slices=3))
    rng = random.Random(draw(st.integers(0, 2**32)))
    homes = random_homes(rng, rng.randint(1, max_ranks), max_chunks)
    return random_orders(rng, slicing, homes, rng.choice([0.0, 0.5, 1.0])), slicing
