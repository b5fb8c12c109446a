"""Sizes in bytes, as numbers or as people write them."""

from __future__ import annotations

import re

from .errors import ArgumentError

__all__ = ["byte_size"]

_UNITS = {"B": 1} | {
    prefix + suffix: base ** (power + 1) for power, prefix in enumerate("KMGT") for suffix, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*")


def byte_size(size: int | str, argument: str) -> int:
    """Bytes of ``size``: an int, or text such as "256MiB", "1.5 GiB" (powers of 1024) or "2GB" (powers of 1000).

    ArgumentError, naming ``argument``, for anything else, and for less than one byte.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2] not in _UNITS:
            raise ArgumentError(argument, repr(size), "a size such as '256MiB', or a number of bytes")
        number = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    elif isinstance(size, int) and not isinstance(size, bool):
        number = size
    else:
        raise ArgumentError(argument, repr(size), "a size such as '256MiB', or a number of bytes")
    if not 0 < number < 2**63:
        raise ArgumentError(argument, str(number), "at least one byte and less than 2**63")
    return number
