"""Tables that fit the terminal and never drop a letter of what a node said.

The last column wraps at spaces, beside the others while its longest word has room there, else below them. When even
the others do not fit, each row becomes a block of `HEADER  value` lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from llmgw.ctl.text import escape, width, wrap

UNKNOWN = "?"
ABSENT = "-"
_GAP = 2
_LEAST_WORDS = 24
_INDENT = "    "

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2"}
_STATE_COLOURS = {
    "connected": "green", "ready": "green", "named": "green",
    "stale": "yellow", "installing": "yellow", "fetching": "yellow", "starting": "yellow", "loading": "yellow",
    "pending": "yellow", "draining": "yellow", "unresponsive": "yellow", "unprobed": "yellow",
    "lost": "red", "never": "red", "failed": "red", "broken": "red", "refused": "red",
    "stopped": "dim", "absent": "dim", "off": "dim",
}  # fmt: skip


@frozen
class Cell:
    """One cell. `colour` only repeats what the text says."""

    text: str
    colour: str = ""


def state_cell(text: str, state: str | None = None) -> Cell:
    """A cell coloured by a state: its own text, or `state` where the text says more."""
    return Cell(text, _STATE_COLOURS.get(state or text, ""))


def shown(value: object) -> str:
    """A value as a cell: `?` when it is unknown, `-` when it is known to be nothing."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or ABSENT


def render(
    headers: Sequence[str],
    rows: Sequence[Sequence[Cell | str | None]],
    *,
    columns: int | None = None,
    colour: bool = False,
) -> list[str]:
    """The lines of a table.

    Args:
        headers: one per column; the last column wraps.
        rows: cells; None becomes `?`, "" becomes `-`. Text is escaped here, so cells hold it as it came.
        columns: width of the terminal; None never wraps.
        colour: write ANSI colours.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max([width(header), *(width(row[i].text) for row in cells)]) for i, header in enumerate(headers)]
    fixed = sum(w + _GAP for w in widths[:-1])
    if columns is None or fixed + widths[-1] <= columns:
        return _beside(headers, cells, widths, None, colour)
    left = columns - fixed
    if left >= max(_LEAST_WORDS, *(width(word) for row in cells for word in row[-1].text.split(" "))):
        return _beside(headers, cells, widths, left, colour)
    if fixed - _GAP <= columns:
        return _below(headers, cells, widths, columns, colour)
    return _blocks(headers, cells, columns, colour)


def _beside(
    headers: Sequence[str], cells: Sequence[Sequence[Cell]], widths: Sequence[int], left: int | None, colour: bool
) -> list[str]:
    """The last column wraps beside the others, in `left` columns."""
    lines = [_line([Cell(h) for h in headers], widths, colour=False)]
    indent = " " * sum(w + _GAP for w in widths[:-1])
    for row in cells:
        words = [row[-1].text] if left is None else wrap(row[-1].text, left)
        lines.append(_line([*row[:-1], Cell(words[0], row[-1].colour)], widths, colour))
        lines += [indent + _painted(Cell(more, row[-1].colour), colour) for more in words[1:]]
    return lines


def _below(
    headers: Sequence[str], cells: Sequence[Sequence[Cell]], widths: Sequence[int], columns: int, colour: bool
) -> list[str]:
    """The last column stands below the others, indented."""
    lines = [_line([Cell(h) for h in headers[:-1]], widths[:-1], colour=False)]
    for row in cells:
        lines.append(_line(row[:-1], widths[:-1], colour))
        words = wrap(row[-1].text, max(columns - len(_INDENT), _LEAST_WORDS))
        lines += [_INDENT + _painted(Cell(more, row[-1].colour), colour) for more in words]
    return lines


def pairs(items: Sequence[tuple[str, Cell | str | None]], *, columns: int | None, colour: bool) -> list[str]:
    """`name  value` lines, values aligned and wrapped at spaces."""
    left = max((width(name) for name, _ in items), default=0) + _GAP
    lines = []
    for name, value in items:
        cell = _cell(value)
        words = wrap(cell.text, max(columns - left, _LEAST_WORDS)) if columns is not None else [cell.text]
        lines.append(name + " " * (left - width(name)) + _painted(Cell(words[0], cell.colour), colour))
        lines += [" " * left + _painted(Cell(more, cell.colour), colour) for more in words[1:]]
    return lines


def _cell(value: Cell | str | None) -> Cell:
    if isinstance(value, Cell):
        return Cell(escape(value.text) or ABSENT, value.colour)
    return Cell(escape(shown(value)))


def _line(row: Sequence[Cell], widths: Sequence[int], colour: bool) -> str:
    out = ""
    for cell, size in zip(row[:-1], widths[:-1], strict=True):
        out += _painted(cell, colour) + " " * (size - width(cell.text) + _GAP)
    return (out + _painted(row[-1], colour)).rstrip(" ")


def _painted(cell: Cell, colour: bool) -> str:
    return f"\x1b[{_COLOURS[cell.colour]}m{cell.text}\x1b[0m" if colour and cell.colour and cell.text else cell.text


def _blocks(headers: Sequence[str], cells: Sequence[Sequence[Cell]], columns: int, colour: bool) -> list[str]:
    lines: list[str] = []
    for row in cells:
        lines += ["", *pairs(list(zip(headers, row, strict=True)), columns=columns, colour=colour)]
    return lines[1:]
