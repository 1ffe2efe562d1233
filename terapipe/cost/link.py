"""What a message costs between two ranks."""

from dataclasses import dataclass

from terapipe.errors import CostError, as_number


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
