"""The step × rank grid: a schedule as text, for eyes and for error messages."""

from collections.abc import Collection, Sequence

Cell = tuple[int, int]  # (rank, step)


def format_grid(
    orders: Sequence[Sequence[object]], marked: Collection[Cell] = (), first_step: int = 0, n_steps: int | None = None
) -> str:
    """One row a step, one column a rank; marked cells stand between > and <.

    Parameters
    ----------
    orders
        What each rank runs, in its order.
    marked
        (rank, step) of the cells to mark.
    first_step, n_steps
        The window of steps to show; all by default.
    """
    longest = max([*(len(order) for order in orders), *(step + 1 for _, step in marked)], default=0)
    end = longest if n_steps is None else min(longest, first_step + n_steps)
    cells = [
        [_cell(order[step] if step < len(order) else "", (rank, step) in marked) for rank, order in enumerate(orders)]
        for step in range(first_step, end)
    ]
    heads = [f" rank {rank}" for rank in range(len(orders))]
    widths = [max(len(text) for text in column) for column in zip(heads, *cells, strict=True)]
    label = max(4, len(str(end)))
    lines = [" ".join([" " * label, *(head.ljust(width) for head, width in zip(heads, widths, strict=True))])]
    lines += [
        " ".join([str(first_step + index).rjust(label), *(text.ljust(width) for text, width in zip(row, widths, strict=True))])
        for index, row in enumerate(cells)
    ]
    return "\n".join(line.rstrip() for line in ["step"[:label] + lines[0][4:], *lines[1:]])


def format_around(orders: Sequence[Sequence[object]], marked: Collection[Cell], margin: int = 4) -> str:
    """The part of the grid around the marked cells."""
    steps = [step for _, step in marked]
    first = max(0, min(steps) - margin)
    # A cycle can span a long schedule; its first steps tell the story.
    return format_grid(orders, marked, first, min(max(steps) - first + margin + 1, 40))


def _cell(content: object, is_marked: bool) -> str:
    text = str(content)
    return f">{text or 'nothing'}<" if is_marked else f" {text} "
