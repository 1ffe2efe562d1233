"""Two stages a rank, the second on the way back: stage r and stage 2P−1−r on rank r, whole microbatches.

The last stage shares a rank with the first, so a microbatch turns round without a message, and all
ranks hold about as much.
"""

from collections import Counter, deque
from collections.abc import Iterator

from terapipe.schedule.action import Action, Kind
from terapipe.schedule.orders.family import Family
from terapipe.schedule.orders.pipeline import Order, Pipeline

SLOTS = 6  # of a microbatch on a rank: F, I and W of two stages


def zbv(pipeline: Pipeline) -> list[Order]:
    """ZB-V: as much memory as 1f1b, and a rank's own span without a gap where F, I and W take the same."""
    n_ranks, n_microbatches = pipeline.n_ranks, pipeline.n_microbatches
    orders = []
    for rank in range(n_ranks):
        after = n_ranks - rank - 1
        plan = ["F0"] * (2 * after + 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * (after + 1)
        plan += ["F0", "I0", "W0", "F1", "I1", "W1"] * (n_microbatches - n_ranks)
        plan += ["I0", "I1"] * rank + ["I0", "W0"] * (after + 1) + ["W1"] * n_microbatches + ["W0"] * n_microbatches
        orders.append(list(_count(pipeline, rank, plan)))
    return orders


def dualpipev(pipeline: Pipeline) -> list[Order]:
    """DualPipe folded into a V: a forward and a full backward side by side, and W only at the ends."""
    n_ranks = pipeline.n_ranks
    orders = []
    for rank in range(n_ranks):
        after = n_ranks - rank - 1
        turn = [("B" if index <= rank else "I") + "10"[index % 2] for index in range(2 * (rank + 1))]
        plan = ["F0"] * (2 * after) + ["F0", "F1"] * (rank + 1) + ["I1", "W", "F1"] * after
        plan += ["F0", "B1", "F1", "B0"] * (pipeline.n_microbatches - n_ranks - after) + ["B1", "F1", "B0"] * after
        plan += turn + ["W", "I0"] * after + ["W"] * (rank + 1)
        orders.append(list(_count(pipeline, rank, plan)))
    return orders


def _count(pipeline: Pipeline, rank: int, plan: list[str]) -> Iterator[Action]:
    """Number the microbatches of a plan of kinds and chunks; a step is left out where none is left for it.

    W runs the oldest I that waits: on its chunk, or on any where it names none.
    """
    stages = {"0": rank, "1": 2 * pipeline.n_ranks - 1 - rank}
    n_done: Counter[str] = Counter()
    waiting: deque[tuple[str, int]] = deque()
    for step in plan:
        kind, chunk = Kind[step[0]], step[1:]
        if kind is Kind.W:
            found = next((each for each in waiting if chunk in ("", each[0])), None)
            if found is not None:
                waiting.remove(found)
                yield Action(stages[found[0]], kind, found[1])
            continue
        counter = ("F" if kind is Kind.F else "B") + chunk
        microbatch = n_done[counter]
        if microbatch < pipeline.n_microbatches:
            n_done[counter] += 1
            if kind is Kind.I:
                waiting.append((chunk, microbatch))
            yield Action(stages[chunk], kind, microbatch)


def v_half(pipeline: Pipeline) -> list[Order]:
    """About half the memory of 1f1b: F and I of every microbatch at fixed slots, W in the first free ones."""
    n_ranks = pipeline.n_ranks
    gap = 3 if n_ranks % 2 == 0 else 0
    return [
        _place(
            pipeline, rank, [2 * rank, 3 * n_ranks - rank - 2, 3 * n_ranks + gap + 2 * rank - 1, 6 * n_ranks + gap - rank - 2]
        )
        for rank in range(n_ranks)
    ]


def v_min(pipeline: Pipeline) -> list[Order]:
    """About a third of the memory of 1f1b, in the same way; slow where F, I and W differ."""
    n_ranks = pipeline.n_ranks
    gap = 2 if n_ranks % 3 == 0 else 0
    return [
        _place(pipeline, rank, [rank, 2 * n_ranks - rank - 1, 2 * n_ranks + gap + rank, 4 * n_ranks + gap - rank - 1])
        for rank in range(n_ranks)
    ]


def _place(pipeline: Pipeline, rank: int, offsets: list[int]) -> Order:
    """The order of a rank whose F0, F1, I1 and I0 of microbatch m stand in slots offset + 6m."""
    first, second = rank, 2 * pipeline.n_ranks - 1 - rank
    steps = list(zip(offsets, [(first, Kind.F), (second, Kind.F), (second, Kind.I), (first, Kind.I)], strict=True))
    slots = {
        offset + SLOTS * microbatch: Action(stage, kind, microbatch)
        for microbatch in range(pipeline.n_microbatches)
        for offset, (stage, kind) in steps
    }
    free = 0  # slots before it are taken or too early
    for slot, action in sorted(slots.items()):
        if action.kind is Kind.I:
            free = max(free, slot)
            while free in slots:
                free += 1
            slots[free] = action._replace(kind=Kind.W)
    return [slots[slot] for slot in sorted(slots)]


def too_few_microbatches(pipeline: Pipeline) -> str:
    """What is wrong where DualPipeV has fewer than 2P−1 microbatches; "" if nothing is."""
    needed = 2 * pipeline.n_ranks - 1
    if pipeline.n_microbatches >= needed:
        return ""
    return (
        f"dualpipev needs at least 2P−1 = {needed} microbatches on {pipeline.n_ranks} ranks; "
        f"the slicing {pipeline.slicing} has {pipeline.n_microbatches}."
    )


_PAPER = "Pipeline parallelism with controllable memory, arXiv 2405.15362"

FAMILIES = (
    Family(
        "zbv",
        zbv,
        takes_slices="whole",
        chunks=2,
        kinds="FIW",
        alternatives=("seq1f1b-zb",),
        bubble="(P−1)·t_F/2",
        condition="t_F = t_I = t_W, M ≥ 2·P−2",
        peak_activations="P",
        source="Zero bubble, arXiv 2401.10241",
    ),
    Family(
        "v-half",
        v_half,
        takes_slices="whole",
        chunks=2,
        kinds="FIW",
        runs_on_ranks=False,
        alternatives=("seq1f1b-zb",),
        bubble="(1.75·P−1)·t_F if 2 divides P, else 1.75·(P−1)·t_F",
        condition="t_F = t_I = t_W, M = 4·P",
        peak_activations="⌊(P+2)/2⌋",
        source=_PAPER,
    ),
    Family(
        "v-min",
        v_min,
        takes_slices="whole",
        chunks=2,
        kinds="FIW",
        runs_on_ranks=False,
        alternatives=("seq1f1b-zb",),
        bubble="(2·P−1.5)·t_F if 3 divides P, else (2·P−2.5)·t_F",
        condition="t_F = t_I = t_W, M = 4·P, P > 1",
        peak_activations="⌊(P+4)/3⌋",
        source=_PAPER,
    ),
    Family(
        "dualpipev",
        dualpipev,
        takes_slices="whole",
        chunks=2,
        kinds="FBIW",
        runs_on_ranks=False,
        misfit=too_few_microbatches,
        alternatives=("zbv", "seq1f1b-zb"),
        bubble="(P−1)·t_F/2",
        condition="t_F = t_I = t_W, M ≥ 2·P−1",
        peak_activations="P+1/2",
        source="DualPipe, arXiv 2412.19437, cut in half",
    ),
)
