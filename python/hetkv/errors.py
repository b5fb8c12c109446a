"""The errors of hetkv. Each carries its fields as attributes, and can be pickled.

Every class also derives from the built-in one that says the same more roughly: a caller's mistake is a ``ValueError``, a
refusal or a state that forbids the call is a ``RuntimeError``. A broken invariant inside hetkv is no exception: the process
ends with the rule.
"""

from __future__ import annotations

__all__ = [
    "AdmissionError",
    "ArgumentError",
    "HetkvError",
    "LayoutError",
    "NotClearedError",
    "PendingError",
    "PositionError",
    "RouteError",
    "StaleVersionError",
]


class HetkvError(Exception):
    """Base of all errors of hetkv."""


class ArgumentError(HetkvError, ValueError):
    """A bad argument.

    argument: its name. value: what came, as text. expected: what would have been right, as text.
    """

    def __init__(self, argument: str, value: str, expected: str) -> None:
        super().__init__(argument, value, expected)
        self.argument = argument
        self.value = value
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.argument} = {self.value}: expected {self.expected}"


class LayoutError(HetkvError, ValueError):
    """A layout that cannot be built, or does not fit what it is used with.

    group, field: names, empty where none is to blame. message: the whole text.
    """

    def __init__(self, group: str, field: str, message: str) -> None:
        super().__init__(group, field, message)
        self.group = group
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return self.message


class RouteError(HetkvError, ValueError):
    """An operation that the kind x operation table forbids. Nothing was touched.

    kind, operation: names, such as "disk_prefix" and "spill".
    """

    def __init__(self, kind: str, operation: str) -> None:
        super().__init__(kind, operation)
        self.kind = kind
        self.operation = operation

    def __str__(self) -> str:
        return f"operation {self.operation!r} is not legal on kind {self.kind!r}"


class AdmissionError(HetkvError, RuntimeError):
    """Memory was refused. Nothing was changed.

    kind: the kind that was short, or "namespace" (quota) or "pin_prefix". need, cap: bytes. retryable: False if it can never fit
    into this cache, True if it may fit after other sequences end.
    """

    def __init__(self, kind: str, need: int, cap: int, retryable: bool, message: str = "") -> None:
        super().__init__(kind, need, cap, retryable, message)
        self.kind = kind
        self.need = need
        self.cap = cap
        self.retryable = retryable
        self.message = message

    def __str__(self) -> str:
        return self.message or f"refused: {self.kind} needs {self.need} bytes, the cap is {self.cap}"


class StaleVersionError(HetkvError, RuntimeError):
    """Rows or a step of another weights version than the sequence's.

    have: the sequence's version. running: the cache's.
    """

    def __init__(self, have: str, running: str) -> None:
        super().__init__(have, running)
        self.have = have
        self.running = running

    def __str__(self) -> str:
        return f"sequence belongs to version {self.have!r}, running is {self.running!r}"


class PositionError(HetkvError, ValueError):
    """A state was offered as the state at another position. Nothing was committed.

    group: its name. claimed: the position it was offered for. actual: the position of the state. Both in tokens.
    """

    def __init__(self, group: str, claimed: int, actual: int) -> None:
        super().__init__(group, claimed, actual)
        self.group = group
        self.claimed = claimed
        self.actual = actual

    def __str__(self) -> str:
        return f"group {self.group!r}: state of position {self.actual} cannot be published as the state at {self.claimed}"


class PendingError(HetkvError, RuntimeError):
    """A sequence was used while what it resumes from is still being loaded: ``wait`` for it, ``await`` it, or poll ``ready``."""

    def __str__(self) -> str:
        return "the sequence waits for a restore: wait for it, await it, or poll `ready`"


class NotClearedError(HetkvError, RuntimeError):
    """Blocks that changed hands were published before their clearing was confirmed.

    ranges: how many ranges were still open.
    """

    def __init__(self, ranges: int) -> None:
        super().__init__(ranges)
        self.ranges = ranges

    def __str__(self) -> str:
        return f"{self.ranges} range(s) handed out for clearing were not confirmed"
