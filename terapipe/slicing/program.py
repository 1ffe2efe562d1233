"""The dynamic program of eq. (7, 8), compiled: least sums over slicings whose slices keep two limits.

Slices are packed by where they start: row `start` holds the slices that end at start+1 … n, in
units of the granularity. A slice has a value to be summed and two values that must stay at or below
a limit each. Nothing here knows what the values mean.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

Cells = npt.NDArray[np.float64]
Ends = npt.NDArray[np.int64]


@njit(cache=True)
def row_offset(start: int, n: int) -> int:
    """Where the slices from `start` begin among the packed cells."""
    return start * n - start * (start - 1) // 2


@njit(cache=True)
def least_later(values: Cells, n: int) -> Cells:
    """For each slice, the least value among it and all longer ones from the same start.

    It rises along a row whatever the values do, so that a bisection finds the last slice that can
    keep a limit: slices beyond it need not be looked at, for any values.
    """
    later = values.copy()
    for start in range(n):
        row = later[row_offset(start, n) : row_offset(start + 1, n)]
        for index in range(len(row) - 2, -1, -1):
            row[index] = min(row[index], row[index + 1])
    return later


@njit(cache=True)
def extend(summed: Cells, limited: Cells, later: Cells, limits: Cells, n: int, source: Cells, target: Cells) -> None:
    """Add one slice: target[end] = min(target[end], source[start] + its value) over all slices within the limits.

    `limited` and `later` have a row for each limit. With source and target the same array, any number of slices is added.
    """
    for start in range(n):
        base = source[start]
        if base == np.inf:
            continue
        low, high = row_offset(start, n), row_offset(start + 1, n)
        reach = high - low
        for which in range(len(limits)):
            reach = min(reach, np.searchsorted(later[which, low:high], limits[which], side="right"))
        ends = target[start + 1 : start + 1 + reach]
        values, first, second = summed[low : low + reach], limited[0, low : low + reach], limited[-1, low : low + reach]
        for index in range(reach):
            total = base + values[index]
            fits = (first[index] <= limits[0]) & (second[index] <= limits[-1])
            ends[index] = total if fits & (total < ends[index]) else ends[index]


@njit(cache=True)
def least_sums(summed: Cells, limited: Cells, later: Cells, limits: Cells, n: int, max_slices: int) -> Cells:
    """Least sum to each end, (1, n+1); with `max_slices` > 0 one row for each number of slices, (max_slices+1, n+1)."""
    least = np.full((max_slices + 1, n + 1), np.inf)
    least[0, 0] = 0.0
    if max_slices == 0:
        extend(summed, limited, later, limits, n, least[0], least[0])
    for count in range(max_slices):
        extend(summed, limited, later, limits, n, least[count], least[count + 1])
    return least


@njit(cache=True)
def trace_ends(summed: Cells, limited: Cells, limits: Cells, n: int, least: Cells) -> Ends:
    """Ends of the slices that make up the least sum to n; the fewest and longest first among equals."""
    ends = np.empty(n, dtype=np.int64)
    count, row = 0, int(np.argmin(least[:, n]))
    end = n
    while end > 0:
        before = max(row - 1, 0)
        for start in range(end):
            cell = row_offset(start, n) + end - start - 1
            fits = limited[0, cell] <= limits[0] and limited[-1, cell] <= limits[-1]
            if fits and least[before, start] + summed[cell] == least[row, end]:
                break
        ends[count] = end
        count, end, row = count + 1, start, before
    return ends[:count][::-1]
