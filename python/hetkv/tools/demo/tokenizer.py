"""A small deterministic tokenizer made from CPython's own help texts (`pydoc_data.topics`)."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pydoc_data.topics import topics

_PIECES = re.compile(r" ?[A-Za-z]+| ?[0-9]+|\n+ *| +|[^\w\s]|.", re.DOTALL)
_BYTES = 256


@cache
def corpus() -> dict[str, str]:
    """Topic name to text, in name order. Text only: no markup is removed."""
    return {name: str(topics[name]) for name in sorted(topics)}


class Tokenizer:
    """Word pieces with a byte fallback: ids 0..255 are bytes, the rest the most frequent pieces of the corpus.

    `vocabulary` is the number of ids. The same text and vocabulary always give the same ids; decode(encode(text)) == text.
    """

    def __init__(self, vocabulary: int = 1024) -> None:
        if vocabulary <= _BYTES:
            raise ValueError(f"a vocabulary of {vocabulary} leaves no room beside {_BYTES} bytes")
        counts: Counter[str] = Counter()
        for text in corpus().values():
            counts.update(_PIECES.findall(text))
        ranked = sorted((piece for piece in counts if len(piece) > 1), key=lambda piece: (-counts[piece], piece))
        self._pieces = ranked[: vocabulary - _BYTES]
        self._ids = {piece: _BYTES + n for n, piece in enumerate(self._pieces)}
        self.vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            known = self._ids.get(piece)
            if known is None:
                ids.extend(piece.encode())
            else:
                ids.append(known)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become replacement characters."""
        raw = b"".join(bytes([i]) if i < _BYTES else self._pieces[i - _BYTES].encode() for i in ids)
        return raw.decode(errors="replace")
