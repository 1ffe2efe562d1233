"""A second simulator, at the level of orders: what the tests hold the package against.

Written from the definitions of the schedules, and from no code of the package. For stage g,
microbatch m, slice s:

    F(g,m,s)  after  F(g-1,m,s)  and  F(g,m,s-1)
    B(g,m,s)  after  F(g,m,s),  B(g+1,m,s)  and  B(g,m,s+1);   I as B
    W(g,m,s)  after  I(g,m,s)

and every action after the one before it in its rank's order. Actions are text, "2F0.3".
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache

Orders = Sequence[Sequence[str]]
Duration = Callable[[int, str, int, int], float]  # (stage, kind, microbatch, slice) -> ms
Times = dict[str, tuple[float, float]]  # text -> (start, end)


class Stuck(Exception):
    """No rank can go on."""


@cache
def split(text: str) -> tuple[int, str, int, int]:
    stage, kind, microbatch, place = re.fullmatch(r"(\d+)([FBIW])(\d+)\.(\d+)", text).groups()
    return int(stage), kind, int(microbatch), int(place)


@cache
def inputs(text: str) -> list[str]:
    """Whatever may have to end first, were it part of the schedule."""
    g, kind, m, s = split(text)
    if kind == "F":
        return [f"{g - 1}F{m}.{s}", f"{g}F{m}.{s - 1}"]
    if kind == "W":
        return [f"{g}I{m}.{s}"]
    return [f"{g}F{m}.{s}"] + [f"{stage}{half}{m}.{place}" for half in "BI" for stage, place in ((g + 1, s), (g, s + 1))]


def times(
    orders: Orders,
    duration: Duration,
    latency: Callable[[int, int], float] = lambda source, target: 0.0,
    transmission: Callable[[int, int, str], float] = lambda source, target, text: 0.0,
    blocking: bool = False,
) -> Times:
    """Longest path: start = max(end of the rank's action before, arrival of every input).

    A message leaves after the one that its sender sent to the same rank before it, occupies the
    link for `transmission`, and arrives `latency` later; `blocking` keeps the sender until then.
    """
    home = {split(text)[0]: rank for rank, order in enumerate(orders) for text in order}
    present = {text for order in orders for text in order}
    done: Times = {}
    there: dict[str, float] = {}  # when an output has reached its receiver
    sent: dict[tuple[int, int], float] = {}
    at, free = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and all(need in done for need in inputs(order[at[rank]]) if need in present):
                text = order[at[rank]]
                g, kind, _, _ = split(text)
                arrivals = [
                    there[need] if home[split(need)[0]] != rank else done[need][1] for need in inputs(text) if need in present
                ]
                start = max([free[rank], *arrivals])
                end = free[rank] = start + duration(*split(text))
                done[text] = (start, end)
                target = home.get(g + 1 if kind == "F" else g - 1, rank)
                if kind != "W" and target != rank:
                    sent[rank, target] = max(end, sent.get((rank, target), 0.0)) + transmission(rank, target, text)
                    there[text] = sent[rank, target] + latency(rank, target)
                    free[rank] = there[text] if blocking else end
                at[rank] += 1
                moved = True
    if len(done) < len(present):
        raise Stuck([order[place] for order, place in zip(orders, at, strict=True) if place < len(order)])
    return done


def contended_times(orders: Orders, duration: Duration, contention: float, latency: float = 0.0) -> Times:
    """While two or more ranks compute, each does 1/contention of its work a millisecond; messages are not slowed."""
    home = {split(text)[0]: rank for rank, order in enumerate(orders) for text in order}
    present = {text for order in orders for text in order}
    begun: dict[str, float] = {}
    done: Times = {}
    at, left, now = [0] * len(orders), [0.0] * len(orders), 0.0

    def arrival(need: str, rank: int) -> float:
        end = done[need][1] if need in done else float("inf")
        return end + (latency if home[split(need)[0]] != rank else 0.0)

    while len(done) < len(present):
        busy, arrivals = [], []
        for rank, order in enumerate(orders):
            if at[rank] == len(order):
                continue
            text = order[at[rank]]
            if text not in begun:
                ready = max([0.0, *(arrival(need, rank) for need in inputs(text) if need in present)])
                if ready > now:
                    arrivals.append(ready)
                    continue
                begun[text], left[rank] = now, duration(*split(text))
            busy.append(rank)
        slowdown = contention if len(busy) > 1 else 1.0
        first = min(busy, key=lambda rank: left[rank], default=None)
        end = now + left[first] * slowdown if first is not None else float("inf")
        until = min([end, *arrivals])
        for rank in busy:
            left[rank] -= (until - now) / slowdown
        now = until
        if first is not None and until == end:
            text = orders[first][at[first]]
            done[text] = (begun[text], now)
            at[first] += 1
    return done


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut `total` tokens into slices: 2^(total-1) of them."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)
