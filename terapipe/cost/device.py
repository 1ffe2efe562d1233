"""A device: how fast it computes, reads memory and talks to its group, each figure with its source.

Knows no model and no torch. The presets are vendors' figures, except for what they do not publish,
whose source says "assumed"; "this machine" is measured when it is first asked for.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any

from terapipe.errors import CostError, as_number, unknown_name

THIS_MACHINE = "this machine"
_FIGURES = ("memory_gb_s", "launch_us", "op_gb_s", "op_latency_us", "memory_gb")
_MAY_BE_0 = ("launch_us", "op_latency_us")


@dataclass(frozen=True)
class Device:
    """What one rank's accelerator, or core, can do at best.

    Parameters
    ----------
    name : str
    peak_tflops : {int: float}
        1e12 floating-point operations a second of a matrix product, by the bytes of a number:
        2 (float16, bfloat16), 4 (float32), 8 (float64).
    memory_gb_s : float
        Memory bandwidth, GigaBYTES (1e9 bytes) a second, reads and writes together.
    launch_us : float
        Floor of one kernel in microseconds: no kernel takes less, however small.
    op_gb_s, op_latency_us : float
        All-reduce inside an op-parallel group: gigabytes a second each way, and microseconds for its start.
    memory_gb : float
        Gigabytes of memory.
    source : {str: str}
        Where each of these figures comes from.
    """

    name: str
    peak_tflops: Mapping[int, float] = field(hash=False)
    memory_gb_s: float
    launch_us: float
    op_gb_s: float
    op_latency_us: float
    memory_gb: float
    source: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        if not self.peak_tflops:
            raise CostError(f"device {self.name!r} has peak_tflops={{}}: needs a rate for at least one size of number.")
        rates = {size: _check(f"peak_tflops[{size}]", rate, may_be_0=False) for size, rate in self.peak_tflops.items()}
        object.__setattr__(self, "peak_tflops", rates)
        for name in _FIGURES:
            object.__setattr__(self, name, _check(name, getattr(self, name), name in _MAY_BE_0))
        missing = [each.name for each in fields(self)[1:-1] if not self.source.get(each.name)]
        if missing:
            raise CostError(f"device {self.name!r} has no source for {missing}; say where each figure comes from.")

    @classmethod
    def preset(cls, name: str) -> "Device":
        """A device by name, in any case and spacing; `presets/devices.json` states each figure's source.

        "this machine" is measured: a second of numpy on one thread, once a process.
        """
        presets = _presets()
        names = {_plain(each): each for each in [*presets, THIS_MACHINE]}
        if not isinstance(name, str) or _plain(name) not in names:
            raise CostError(unknown_name("device", name, names.values()))
        found = names[_plain(name)]
        return _this_machine() if found == THIS_MACHINE else _read(found, presets[found])

    def peak_flops(self, dtype_bytes: int) -> float:
        """Floating-point operations a second with numbers of this size."""
        if dtype_bytes not in self.peak_tflops:
            raise CostError(
                f"dtype_bytes={dtype_bytes!r}: device {self.name!r} has rates for numbers of "
                f"{', '.join(map(str, sorted(self.peak_tflops)))} bytes. Use one of them, or a Device of your own."
            )
        return self.peak_tflops[dtype_bytes] * 1e12


def _plain(name: str) -> str:
    return "".join(name.split()).lower()


def _check(name: str, value: object, may_be_0: bool) -> float:
    number = as_number(value)
    if not number >= 0 or (number == 0 and not may_be_0):
        raise CostError(f"{name}={value!r}: needs a number {'≥' if may_be_0 else '>'} 0.")
    return number


@cache
def _presets() -> dict[str, dict[str, Any]]:
    return dict(json.loads(resources.files("terapipe").joinpath("presets/devices.json").read_text("utf-8")))


def _read(name: str, values: Mapping[str, Any]) -> Device:
    rates = {int(size): float(rate) for size, rate in values["peak_tflops"].items()}
    return Device(name, **(dict(values) | {"peak_tflops": rates}))


# Prints TFLOP/s of float32, GB/s of a copy (read and write), µs of a smallest call: medians.
_MEASUREMENT = """
import time
import numpy as np

def median_s(function, n_repeats, n_calls=1):
    function()
    times = []
    for _ in range(n_repeats):
        start = time.perf_counter()
        for _ in range(n_calls):
            function()
        times.append((time.perf_counter() - start) / n_calls)
    return float(np.median(times))

square = np.ones((768, 768), dtype=np.float32)
product = np.empty_like(square)
source = np.ones(8_000_000, dtype=np.float32)
target = np.empty_like(source)
one = np.ones((1, 1), dtype=np.float32)
print(
    2e-12 * 768**3 / median_s(lambda: np.matmul(square, square, out=product), 15),
    2e-9 * source.nbytes / median_s(lambda: np.copyto(target, source), 15),
    1e6 * median_s(lambda: np.matmul(one, one), 15, n_calls=200),
)
"""


@cache
def _this_machine() -> Device:
    """Measured in a process of its own, as a thread count cannot be set once numpy is loaded."""
    names = ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB_MAXIMUM", "NUMEXPR")
    environment = os.environ | {f"{name}_NUM_THREADS": "1" for name in names}
    done = subprocess.run(
        [sys.executable, "-c", _MEASUREMENT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise CostError(
            f"this machine could not be measured: {done.stderr.strip()[-300:]} Use a preset, or a Device of your own."
        )
    tflops, gb_s, call_us = map(float, done.stdout.split())
    measured = "measured here: numpy, one thread"
    return Device(
        THIS_MACHINE,
        peak_tflops={4: tflops},
        memory_gb_s=gb_s,
        launch_us=call_us,
        op_gb_s=gb_s / 2,
        op_latency_us=50.0,
        memory_gb=_memory_gb(),
        source={
            "peak_tflops": f"{measured}, float32 product of 768 × 768 matrices",
            "memory_gb_s": f"{measured}, copy of 32 MB, read and written",
            "launch_us": f"{measured}, product of 1 × 1 matrices",
            "op_gb_s": "assumed: half the copy bandwidth, as a message is copied once more",
            "op_latency_us": "assumed: a small message between two processes",
            "memory_gb": "the operating system; infinite where it does not say",
        },
    )


def _memory_gb() -> float:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (AttributeError, ValueError, OSError):
        return float("inf")
