"""All schedule families by name, and the table of what is known of them."""

from typing import TYPE_CHECKING

from terapipe.schedule.orders import capped, interleaved, one_f_one_b, two_phase, v_shaped, zero_bubble
from terapipe.schedule.orders.family import Family

if TYPE_CHECKING:
    import pandas as pd

_GIVEN = (
    *two_phase.FAMILIES,
    *one_f_one_b.FAMILIES,
    *interleaved.FAMILIES,
    *zero_bubble.FAMILIES,
    *v_shaped.FAMILIES,
    *capped.FAMILIES,
)
_ORDER = (
    *("gpipe", "terapipe", "1f1b", "seq1f1b", "interleaved", "seq1f1b-interleaved", "slimpipe"),
    *("zb-h1", "zb-h2", "seq1f1b-zb", "zbv", "v-half", "v-min", "dualpipev", "svpp", "looped-bfs", "forward-only"),
)

FAMILIES: dict[str, Family] = {family.name: family for family in sorted(_GIVEN, key=lambda each: _ORDER.index(each.name))}


def schedules() -> "pd.DataFrame":
    """The schedule families, one a row: what each can run, its bubble and its memory.

    Returns
    -------
    DataFrame
        Index: name. Columns: takes_slices ("any"; "equal": as many in every microbatch; "whole"),
        chunks_per_rank (stages on a rank), options (all needed), splits_backward (some backwards
        run as I and W), runs_on ("simulator and ranks", or "simulator" for those tried only there),
        bubble (idle time of a rank in a step, equal ranks and slices of equal time, free messages),
        condition (when it is that), peak_activations (on rank r; 1 = one microbatch on one rank;
        never more than M), source.

        P ranks, M microbatches, k slices each, N = M·k units, v stages a rank, G units of one group
        (`orders.interleaved`); t_F, t_B = t_I + t_W: forward and backward of one microbatch on one rank.

    Examples
    --------
    >>> import terapipe as tp
    >>> tp.schedules().loc["seq1f1b", "bubble"]
    '(P−1)·(t_F+t_B)/k'
    """
    import pandas as pd

    rows = {name: _describe(family) for name, family in FAMILIES.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("name")


def _describe(family: Family) -> dict[str, object]:
    return {
        "takes_slices": family.takes_slices,
        "chunks_per_rank": f"{family.chunks}, or any other" if family.any_chunks else str(family.chunks),
        "options": ", ".join(family.options),
        "splits_backward": family.splits_backward,
        "runs_on": "simulator and ranks" if family.runs_on_ranks else "simulator",
        "bubble": family.bubble,
        "condition": family.condition,
        "peak_activations": family.peak_activations,
        "source": family.source,
    }
