"""The clock that times a slice on a device: perf_counter on a CPU, event pairs on CUDA."""

import time
from typing import Any

import torch

from terapipe.errors import SpecError, unknown_name

DEVICES = ("cpu", "cuda")


class Clock:
    """The CPU's clock: what was called has been computed when the call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @property
    def name(self) -> str:
        """What the times are of."""
        return "cpu"

    def settle(self) -> None:
        """Wait until the device has nothing left to do."""

    def mark(self) -> Any:
        """A moment, between two pieces of work."""
        return time.perf_counter()

    def between_ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to the next, once the device has settled."""
        return float(end - start) * 1e3


class EventClock(Clock):
    """A CUDA device's own clock: calls return before their kernels run, so events are put between them.

    Between two events lies what the kernels took, and what the device waited for their launches.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)

    @property
    def name(self) -> str:
        """The device's own name."""
        return str(torch.cuda.get_device_name(self.device))

    def settle(self) -> None:
        """Wait until the device has nothing left to do."""
        torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """An event in the device's queue, which notes the time when its turn comes."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one event to the next."""
        return float(start.elapsed_time(end))


def make_clock(device: str, rank: int) -> Clock:
    """The clock of a rank's device; rank r has CUDA device r."""
    return EventClock(rank) if device == "cuda" else Clock()


def check_device(device: str, n_ranks: int) -> None:
    """Refuse a device that `n_ranks` ranks cannot have here.

    Raises
    ------
    SpecError
        For an unknown name, or more ranks than CUDA devices.
    """
    if device not in DEVICES:
        raise SpecError(unknown_name("device", device, DEVICES))
    if device == "cpu":
        return
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if n_devices == 0:
        raise SpecError("device='cuda': torch sees no CUDA device here. Use device='cpu', or a machine and a torch with CUDA.")
    if n_ranks > n_devices:
        raise SpecError(
            f"device='cuda': {n_ranks} ranks for {n_devices} CUDA device(s); each rank needs one of its own. "
            f"Use n_ranks={n_devices}; n_stages may be larger: a rank then measures several stages, one after another."
        )
