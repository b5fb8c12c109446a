"""A multi-turn conversation load over real text: shared system prompt, shared documents, several users, branching turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from .tokenizer import Tokenizer, corpus

SYSTEM_TOKENS = 176
DOCUMENT_TOKENS = 420
QUESTION_TOKENS = (24, 72)
ANSWER_TOKENS = 160
MAX_PROMPT_TOKENS = 1400
_DOCUMENTS = 3
_USERS = 4
_SYSTEM_TEXT = "You answer questions about Python for a team. Quote the reference text. Keep to the question.\n\n"


@dataclass
class Conversation:
    """One thread of turns. `ends[i]` is the number of tokens after turn i, its answer included."""

    user: int
    document: int
    tokens: list[int]
    ends: list[int] = field(default_factory=list)


@dataclass
class Turn:
    """One request. `prompt` is everything the model must have read; `finish` appends the answer to the conversation."""

    kind: str  # "new", "next" or "branch"
    conversation: Conversation
    prompt: list[int]

    @property
    def label(self) -> str:
        """Who asks what kind of turn, e.g. `user 2 next`."""
        return f"user {self.conversation.user} {self.kind}"

    def finish(self, answer: Sequence[int]) -> None:
        """Appends the generated tokens. Called once."""
        self.conversation.tokens = [*self.prompt, *answer]
        self.conversation.ends.append(len(self.conversation.tokens))


class Workload:
    """Draws turns from `seed`. The first turns show each case once; the rest is random, with the same mix.

    Owns the conversations. Each turn must be finished before the next is drawn. Not thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random = random.Random(seed)
        self._tokenizer = tokenizer
        texts = corpus()
        names = [name for name in texts if len(tokenizer.encode(texts[name])) >= DOCUMENT_TOKENS]
        chosen = self._random.sample(names, _DOCUMENTS)
        self.document_names = tuple(chosen)
        self._documents = [tokenizer.encode(texts[name])[:DOCUMENT_TOKENS] for name in chosen]
        filler = tokenizer.encode(_SYSTEM_TEXT + texts["formatstrings"])
        self._system = filler[:SYSTEM_TOKENS]
        # Questions are sentences of topics that are no document here.
        self._sentences = tokenizer.encode("\n".join(text for name, text in texts.items() if name not in chosen))
        self.conversations: list[Conversation] = []
        self._started = 0
        self._script = ["new", "next", "new", "next", "branch"]

    def next_turn(self) -> Turn:
        """The next request of the load."""
        kind = self._script.pop(0) if self._script else self._draw_kind()
        if kind == "new":
            return self._new()
        open_ones = [c for c in self.conversations if len(c.tokens) + QUESTION_TOKENS[1] + ANSWER_TOKENS < MAX_PROMPT_TOKENS]
        if kind == "branch":
            branching = [c for c in self.conversations if len(c.ends) >= 2]
            if branching:
                return self._branch(self._random.choice(branching))
        if not open_ones:
            return self._new()
        return self._follow(self._random.choice(open_ones))

    def _draw_kind(self) -> str:
        return self._random.choices(("new", "next", "branch"), weights=(3, 6, 2))[0]

    def _new(self) -> Turn:
        # The first two conversations read the same document, so the second one shares it.
        document = 0 if self._started < 2 else self._random.randrange(_DOCUMENTS)
        conversation = Conversation(
            user=self._started % _USERS + 1, document=document, tokens=[*self._system, *self._documents[document]]
        )
        self._started += 1
        self.conversations.append(conversation)
        return Turn("new", conversation, [*conversation.tokens, *self._question()])

    def _follow(self, conversation: Conversation) -> Turn:
        return Turn("next", conversation, [*conversation.tokens, *self._question()])

    def _branch(self, origin: Conversation) -> Turn:
        """Another question after an earlier answer of `origin`, which itself stays as it is."""
        turn = self._random.randrange(len(origin.ends) - 1)
        conversation = Conversation(
            user=origin.user, document=origin.document, tokens=origin.tokens[: origin.ends[turn]], ends=origin.ends[: turn + 1]
        )
        self.conversations.append(conversation)
        return Turn("branch", conversation, [*conversation.tokens, *self._question()])

    def _question(self) -> list[int]:
        length = self._random.randint(*QUESTION_TOKENS)
        start = self._random.randrange(len(self._sentences) - length)
        return [*self._tokenizer.encode("\n\nQ:"), *self._sentences[start : start + length], *self._tokenizer.encode("\nA:")]
