"""Progress on a terminal as a live table, elsewhere as plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .reference import Origin
from .results import SENSITIVITY, Sensitivity, TurnResult

_COLUMNS = (
    "#",
    "turn",
    "prompt",
    "hash hit",
    "recoverable",
    "lost",
    "computed",
    "cold ms",
    "warm ms",
    "resumed",
    "same schedule",
    "cold",
    "tokens",
)
_LEFT = {"turn", "lost", "resumed"}

LEGEND = (
    "prompt, hash hit, recoverable, computed: tokens (num_prompt_tokens, num_hash_hit_tokens, num_recoverable_tokens, and what "
    "the embedding layer saw)\n"
    "cold ms, warm ms: time to the first token.   resumed: how the restored state was made.\n"
    "same schedule, cold: largest logit difference, over all tokens from the resume point on, to the run of the same schedule "
    "(exactly 0) and to a cold prefill"
)

_RESUMED = {
    Origin.NONE: "-",
    Origin.CHUNKS: "chunks",
    Origin.DECODING: "decoding",
    Origin.MIXED: "mixed",
    Origin.UNKNOWN: "UNKNOWN",
}


def _cells(number: int, row: TurnResult) -> list[str]:
    def difference(value: float) -> str:
        return "0" if value == 0.0 else f"{value:.1e}"

    return [
        str(number),
        row.label,
        str(row.prompt_tokens),
        str(row.hash_hit_tokens),
        str(row.recoverable_tokens),
        ", ".join(map(str, row.losses)),
        str(row.computed_tokens),
        f"{row.cold_first_token_ms:.0f}",
        f"{row.warm_first_token_ms:.0f}",
        _RESUMED[row.origin],
        difference(row.difference_schedule),
        difference(row.difference_cold),
        "equal" if row.tokens_equal else "DIFFER",
    ]


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
            self.line("  ".join(_COLUMNS))
            yield
            return
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
            self.line("  ".join(_cells(len(self._rows), row)))
        for problem in row.problems:
            self.line(f"    {row.label}: {problem}", "bold red")

    def sensitivity(self, rows: list[Sensitivity]) -> None:
        """What one zeroed row of each group does."""
        parts = [f"{item.group} {item.row}: {item.change:.2f}" for item in rows]
        style = "" if all(item.ok for item in rows) else "bold red"
        self.line(f"One zeroed row changes the logits (at least {SENSITIVITY:g}) — " + "; ".join(parts), style)

    def _refresh(self) -> None:
        if self._live is None:
            return
        # A live display cannot scroll: show the newest rows that fit, all of them when the section ends.
        fitting = max(3, (self.console.height - 6) // 2)
        first = max(0, len(self._rows) - fitting)
        self._live.update(Group(self._table(self._rows[first:], first), Text(f" … {self._status}", style="dim")))

    def _table(self, rows: list[TurnResult], first: int) -> Table:
        table = Table(title=self._title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in _LEFT else "right", overflow="fold")
        for number, row in enumerate(rows, first + 1):
            table.add_row(*_cells(number, row), style="" if row.ok else "bold red")
        return table
