"""Progress on a terminal as a live table, elsewhere as plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .reference import Origin
from .results import SENSITIVITY, Sensitivity, TurnResult

LEGEND = (
    "prompt, hash hit, recoverable, restored, computed: tokens (num_prompt_tokens, num_hash_hit_tokens, num_recoverable_tokens, "
    "those of them that came from disk, and what the embedding layer saw).\n"
    "cold ms, warm ms: time to the first token, without hetkv and with it.\n"
    "resumed: how the restored state was made. earlier: by a plain run of an earlier process. mixed: every block equals one "
    "plain run's, but not all the same run's.\n"
    "diff same, diff cold: largest logit difference, over every token from the resume point on, to the run of the same schedule "
    "(must be 0) and to a cold prefill."
)


@dataclass(frozen=True)
class _Column:
    """Of the table. width: characters in text lines."""

    name: str
    width: int
    left: bool = False


_COLUMNS = (
    _Column("#", 2),
    _Column("turn", 19, left=True),
    _Column("prompt", 7),
    _Column("hash hit", 9),
    _Column("recoverable", 12),
    _Column("restored", 9),
    _Column("computed", 9),
    _Column("cold ms", 8),
    _Column("warm ms", 8),
    _Column("resumed", 9, left=True),
    _Column("diff same", 10),
    _Column("diff cold", 10),
    _Column("tokens", 7),
)
# Two header lines each, for terminals of 80 columns.
_NARROW = (
    _Column("#", 2),
    _Column("turn", 19, left=True),
    _Column("prompt", 7),
    _Column("hash\nhit", 5),
    _Column("reco-\nverable", 8),
    _Column("res-\ntored", 6),
    _Column("compu-\nted", 7),
    _Column("cold\nms", 5),
    _Column("warm\nms", 5),
    _Column("resumed", 8, left=True),
    _Column("diff\nsame", 5),
    _Column("diff\ncold", 8),
)
_WIDE = 150  # characters that the table with a column of losses needs


def _cells(number: int, row: TurnResult) -> list[str]:
    def difference(value: float) -> str:
        return "0" if value == 0.0 else f"{value:.1e}"

    return [
        str(number),
        row.label,
        str(row.prompt_tokens),
        str(row.hash_hit_tokens),
        str(row.recoverable_tokens),
        str(row.restored_tokens),
        str(row.computed_tokens),
        f"{row.cold_first_token_ms:.0f}",
        f"{row.warm_first_token_ms:.0f}",
        "-" if row.origin is Origin.NONE else row.origin.value,
        difference(row.difference_schedule),
        difference(row.difference_cold),
        "equal" if row.tokens_equal else "DIFFER",
    ]


def _losses(row: TurnResult) -> str:
    return ", ".join(map(str, row.losses))


def _text_line(columns: tuple[_Column, ...], cells: list[str]) -> str:
    parts = []
    for column, cell in zip(columns, cells, strict=False):
        parts.append(f" {cell:<{column.width - 1}}" if column.left else f"{cell:>{column.width}}")
    return "".join(parts)


class Display:
    """Shows one section at a time: rows as they come, and below them what is being computed. Owns the console."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._rows: list[TurnResult] = []
        self._live: Live | None = None
        self._status = ""
        self._title = ""

    def line(self, text: str, style: str = "") -> None:
        """One line of text, at once."""
        self.console.print(text, style=style, soft_wrap=not self.console.is_terminal)

    def progress(self, text: str) -> None:
        """What is being computed now. Shown below the table; not printed where there is no terminal."""
        self._status = text
        self._refresh()

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """A table of rows, live until the section ends."""
        self._rows, self._title, self._status = [], title, ""
        if not self.console.is_terminal:
            self.line(f"\n{title}")
            self.line(_text_line(_COLUMNS, [column.name for column in _COLUMNS]) + "  lost")
            yield
            return
        self.console.print()
        with Live(console=self.console, transient=True, refresh_per_second=8) as live:
            self._live = live
            try:
                self._refresh()
                yield
            finally:
                self._live = None
        self.console.print(self._table(self._rows, 0))

    def row(self, row: TurnResult) -> None:
        """Adds a row to the section."""
        self._rows.append(row)
        if self._live is not None:
            self._refresh()
        elif not self.console.is_terminal:
            self.line(_text_line(_COLUMNS, _cells(len(self._rows), row)) + f"  {_losses(row)}")
        for problem in row.problems:
            self.line(f"    {row.label}: {problem}", "bold red")

    def sensitivity(self, rows: list[Sensitivity]) -> None:
        """What one zeroed row of each group does."""
        if not rows:
            self.line("No row to zero: at this capacity the last prompt cannot be resumed from anywhere")
            return
        parts = [f"{item.group} {item.row}: {item.change:.2f}" for item in rows]
        style = "" if all(item.ok for item in rows) else "bold red"
        self.line(f"One zeroed row changes the logits (at least {SENSITIVITY:g}) — " + "; ".join(parts), style)

    def _refresh(self) -> None:
        if self._live is None:
            return
        # A live display cannot scroll: show the newest rows that fit, all of them when the section ends.
        fitting = max(3, (self.console.height - 7) // 2)
        first = max(0, len(self._rows) - fitting)
        status = Text(f" … {self._status}", style="dim", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._table(self._rows[first:], first), status))

    def _table(self, rows: list[TurnResult], first: int) -> Group | Table:
        """The rows, numbered from first + 1: as a table or, on a narrow terminal, two lines each."""
        if self.console.width < _WIDE:
            return self._lines(rows, first)
        table = Table(title=self._title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for column in _COLUMNS:
            table.add_column(column.name, justify="left" if column.left else "right", no_wrap=True)
        table.add_column("lost")
        for number, row in enumerate(rows, first + 1):
            table.add_row(*_cells(number, row), _losses(row), style="" if row.ok else "bold red")
        return table

    def _lines(self, rows: list[TurnResult], first: int) -> Group:
        upper = _text_line(_NARROW, [column.name.partition("\n")[0] for column in _NARROW])
        lower = _text_line(_NARROW, [column.name.partition("\n")[2] for column in _NARROW])
        lines = [Text(self._title, style="italic"), Text(upper, style="bold"), Text(lower, style="bold")]
        for number, row in enumerate(rows, first + 1):
            lines.append(Text(_text_line(_NARROW, _cells(number, row)), style="" if row.ok else "bold red", no_wrap=True))
            tokens = "" if row.tokens_equal else "TOKENS DIFFER; "
            lines.append(Text(f"   {tokens}lost {_losses(row)}", style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)
