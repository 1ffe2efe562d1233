"""What a message costs between two ranks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from terapipe.errors import CostError, TerapipeError, as_number


@dataclass(frozen=True)
class Link:
    """A one-way connection between two ranks; messages leave one behind another.

    Parameters
    ----------
    latency_ms : float
        Delay of a message on top of its transmission. It does not occupy the link.
    bandwidth_gb_s : float
        GigaBYTES (1e9 bytes) a second; infinite by default.
    overlap : bool
        True: messages travel beside compute. False: the sending rank is busy until its message has
        arrived. A slice leaves an inner rank twice, so that charges it the paper's 2·p2p a slice.
    """

    latency_ms: float = 0.0
    bandwidth_gb_s: float = float("inf")
    overlap: bool = True

    def __post_init__(self) -> None:
        latency_ms, bandwidth_gb_s = as_number(self.latency_ms), as_number(self.bandwidth_gb_s)
        if not 0 <= latency_ms < float("inf"):
            raise CostError(f"latency_ms={self.latency_ms!r}: needs a finite number ≥ 0.")
        if not bandwidth_gb_s > 0:
            raise CostError(f"bandwidth_gb_s={self.bandwidth_gb_s!r}: needs a positive number of gigabytes a second.")
        object.__setattr__(self, "latency_ms", latency_ms)
        object.__setattr__(self, "bandwidth_gb_s", bandwidth_gb_s)

    def transmission_ms(self, n_bytes: float) -> float:
        """Time for which a message of `n_bytes` occupies the link."""
        return n_bytes / (self.bandwidth_gb_s * 1e6)


Links = Link | Mapping[tuple[int, int], Link]


def _are_links(given: object) -> bool:
    """Whether this is a Link, or {(source rank, target rank): Link}."""
    if not isinstance(given, Mapping):
        return isinstance(given, Link)
    pairs_are_pairs = all(isinstance(pair, tuple) and [type(rank) for rank in pair] == [int, int] for pair in given)
    return pairs_are_pairs and all(isinstance(each, Link) for each in given.values())


def check_links(given: object, error: type[TerapipeError] = CostError) -> None:
    """Refuse what is neither None nor `Links`, with its value."""
    if given is not None and not _are_links(given):
        raise error(f"link={given!r}: needs a Link, {{(source rank, target rank): Link}} or None.")


def find_link(links: Links, source: int, target: int) -> Link:
    """The link from one rank to another.

    Raises
    ------
    CostError
        Where links are given for pairs, and not for this one.
    """
    if isinstance(links, Link):
        return links
    if (source, target) not in links:
        raise CostError(
            f"no link from rank {source} to rank {target}; links are given for {sorted(links)}. "
            "Add that pair, or give one Link for all."
        )
    return links[source, target]


def describe_links(links: Links | None) -> Any:
    """Links as plain values: numbers by name, or [source rank, target rank, numbers] of each pair."""
    if isinstance(links, Mapping):
        return [[*pair, asdict(each)] for pair, each in sorted(links.items())]
    return asdict(links) if isinstance(links, Link) else None


def read_links(values: Any) -> Links | None:
    """The links that `describe_links` described.

    Raises
    ------
    CostError
        For anything else.
    """
    try:
        if isinstance(values, list):
            return {(source, target): Link(**numbers) for source, target, numbers in values}
        return None if values is None else Link(**values)
    except (TypeError, ValueError) as error:
        if isinstance(error, CostError):
            raise
        raise CostError(
            f"link={values!r}: needs the numbers of one link by name, or a list of [source rank, target rank, numbers]."
        ) from error
