"""Random slicings and random legal schedules, for the property tests."""

import random
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


@st.composite
def slicings(draw: st.DrawFn, max_tokens: int = 40, max_microbatches: int = 5, max_slices: int = 8) -> Slicing:
    """Any number of microbatches of any number of sequences, each cut on its own, with runs of equal ones."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    total = rng.randint(1, max_tokens)
    microbatches: list[MicrobatchSlices] = []
    while not microbatches or (len(microbatches) < max_microbatches and rng.random() < 0.8):
        if microbatches and rng.random() < 0.5:
            microbatches.append(microbatches[-1])
            continue
        n_slices = rng.randint(1, min(total, max_slices))
        microbatches.append(MicrobatchSlices(rng.randint(1, 3), cut(rng, total, n_slices)))
    return Slicing(tuple(microbatches))


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 4, max_chunks: int = 2) -> tuple[list[list[str]], Slicing]:
    """Orders of a legal schedule: stages on random ranks, B or I and W at random, any topological order."""
    slicing = draw(slicings(max_tokens=8, max_microbatches=3, max_slices=3))
    rng = random.Random(draw(st.integers(0, 2**32)))
    n_ranks = rng.randint(1, max_ranks)
    homes = list(range(n_ranks)) + [rng.randrange(n_ranks) for _ in range(rng.randint(0, n_ranks * (max_chunks - 1)))]
    rng.shuffle(homes)
    actions: set[str] = set()
    split_share = rng.choice([0.0, 0.5, 1.0])
    for stage in range(len(homes)):
        for microbatch, each in enumerate(slicing.microbatches):
            for place in range(each.n_slices):
                kinds = "FIW" if rng.random() < split_share else "FB"
                actions |= {f"{stage}{kind}{microbatch}.{place}" for kind in kinds}
    needs = {text: {need for need in inputs(text) if need in actions} for text in sorted(actions)}
    orders: list[list[str]] = [[] for _ in range(n_ranks)]
    done: set[str] = set()
    while needs:
        text = rng.choice([text for text, need in needs.items() if need <= done])
        del needs[text]
        done.add(text)
        orders[homes[split(text)[0]]].append(text)
    return orders, slicing
