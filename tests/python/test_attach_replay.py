"""An attached model replays what a prefix lacks, and stands where it would have stood: logits of transformers' code, float32.

What is tested here is what a pass of the model may rely on: stored entries win, what does not exist has no effect on what counts.
The replaying request is set up by hand, as admission would: its tables have a donor's history up to p from the start, its history
writes below p go to scratch, and it gets the point states of s that are present. All else that it could read is NaN: one value
of it in a kept result would show. What one token less changes is therefore not small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hetkv
from hetkv.integrations.transformers import Runner, TieRule, adapter_for
from hetkv.integrations.transformers.attach import AttachedModel, AttachedRequest, PagedCache, attach
from hetkv.tools.demo.models import draw_weights, tiny_config
from tiny_models import BUILDERS, VOCABULARY

BLOCK = 64
BOUND = 1e-4
VISIBLE = 1e-3  # what a row too few changes, at least
BEYOND = 130  # tokens past p that are compared
POISON = float("nan")
_UNIT = 256  # bytes: block offsets count in these


Changes = tuple[tuple[str, Any], ...]


def small(layers: int, window: int) -> Changes:
    """A DeepSeek-V4 of sliding layers that end in one of each compressed kind, ratios 4 and 16."""
    compressed = ["compressed_sparse_attention", "heavily_compressed_attention"]
    return (
        ("num_hidden_layers", layers),
        ("layer_types", ["sliding_attention"] * (layers - 2) + compressed),
        ("mlp_layer_types", ["hash_moe"] * layers),
        ("sliding_window", window),
        ("compress_rates", dict(zip(compressed, (4, 16), strict=True))),
    )


STOCK: Changes = ()
CASES = [  # model, changes, p, and the tokens before p that plan D replays
    ("gpt_oss", STOCK, 448, 2 * 127),  # two of four layers have a window
    ("gemma3", STOCK, 512, 3 * 127),
    ("deepseek_v4", STOCK, 640, 4 * 127),  # p at the end of a window of 128
    ("deepseek_v4", STOCK, 701, 4 * 127),
    ("deepseek_v4", small(2, 4), 192, 2 * 3),
    ("deepseek_v4", small(3, 4), 192, 3 * 3),
    ("deepseek_v4", small(4, 8), 192, 4 * 7),
    ("deepseek_v4", small(2, 4), 207, 1 * 3 + 15),  # the open window of the last layer is longer than its window
    ("deepseek_v4", small(3, 4), 207, 2 * 3 + 15),
    ("deepseek_v4", small(4, 8), 207, 3 * 7 + 15),
    ("deepseek_v4", small(3, 4), 111, 21),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Replay:
    """A request that replays up to p, and the one whose history below p it shares. `with` closes both."""

    request: AttachedRequest
    donor: AttachedRequest
    p: int

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.request.close(turn_end=False)
        self.donor.close(turn_end=False)


class World:
    """One model, its tokens, their logits on transformers' own code, and an attached copy with a donor.

    Owns model and cache; `close` detaches.
    """

    def __init__(self, name: str, changes: Changes, tokens: int) -> None:
        self.model = build(name, dict(changes))
        self.tokens: list[int] = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(5)).tolist()
        with TieRule(self.model):
            self.expected = Runner(self.model, BLOCK).prefill(
                adapter_for(self.model).new_cache(), self.tokens, 0, all_logits=True
            )
        layout = hetkv.CacheLayout.from_config(self.model.config, block_size=BLOCK, dtype="float32")
        self.cache = hetkv.Cache(layout, "64MiB")
        self.attached: AttachedModel = attach(self.model, self.cache, max_tokens=256, max_sequence_tokens=2048)
        self.requests = 0

    def open(self) -> AttachedRequest:
        """A request that resumes from nothing, with all tokens as its prompt."""
        self.requests += 1
        return self.attached.open(self.tokens, namespace=self.cache.namespace(f"test {self.requests}"))

    def run_to(self, request: AttachedRequest, end: int) -> None:
        while request.length < end:
            self.attached.run([request], [min(request.next_chunk(BLOCK), end - request.length)])

    def blocks(self, request: AttachedRequest, group: Any, begin: int, end: int) -> list[int]:
        """Blocks with the rows of tokens [begin, end), as offsets of 256 bytes."""
        table = request.sequence.block_table(group.name)
        rows = group.entries_per_block * group.compress_ratio
        return [int(block) for block in table[begin // rows : -(-end // rows)]]

    def part(self, block: int, size: int) -> Tensor:
        return self.cache.arena[block * _UNIT :][:size]

    def give(self, source: AttachedRequest, target: AttachedRequest, retention: hetkv.Retention, begin: int, end: int) -> None:
        """Copies the rows of tokens [begin, end) from one request's blocks to the other's."""
        for group in self.cache.layout.groups:
            if group.retention is retention:
                pairs = zip(self.blocks(source, group, begin, end), self.blocks(target, group, begin, end), strict=True)
                for old, new in pairs:
                    self.part(new, group.block_bytes).copy_(self.part(old, group.block_bytes))

    def give_rings(self, source: AttachedRequest, target: AttachedRequest) -> None:
        for group in self.cache.layout.groups:
            if group.ring_entries:
                old, new = source.sequence.live_block(group.name), target.sequence.live_block(group.name)
                assert old is not None
                assert new is not None
                self.part(new, group.ring_block_bytes).copy_(self.part(old, group.ring_block_bytes))

    def poison(self, request: AttachedRequest, s: int) -> None:
        """Rings and window rows below s hold what no model computed."""
        for group in self.cache.layout.groups:
            if group.ring_entries:
                ring = request.sequence.live_block(group.name)
                assert ring is not None
                self.part(ring, group.ring_block_bytes).view(torch.float32).fill_(POISON)
            if group.retention is hetkv.Retention.window:
                for block in {*self.blocks(request, group, 0, s), self.cache.scratch_block(group.name)}:
                    self.part(block, group.block_bytes).view(torch.float32).fill_(POISON)

    def replaying(self, s: int, p: int, *, windows: bool = False, tails: bool = False) -> Replay:
        """A request that replays from s and resumes at p. windows, tails: present at s."""
        request, donor = self.open(), self.open()
        while request.length < s:
            end = min(request.next_chunk(BLOCK), s - request.length) + request.length
            request.sequence.settle(request.sequence.schedule(end))
            request.length = end
        self.run_to(donor, s)
        self.poison(request, s)
        if windows:
            self.give(donor, request, hetkv.Retention.window, max(0, s - self.window + 1), s)
        if tails:
            self.give_rings(donor, request)
        self.run_to(donor, p)
        return Replay(request, donor, p)

    @property
    def window(self) -> int:
        return int(self.model.config.sliding_window)  # type: ignore[union-attr,arg-type]

    def prepare(self, cache: PagedCache, row: int, first: int, count: int, replay: Replay) -> None:
        """Sequence `row` of a pass, its tokens from row `first` on: stored history is read, and not written."""
        p, request = replay.p, replay.request
        stored = max(0, min(count, p - request.length))
        for group in self.cache.layout.groups:
            if group.retention is not hetkv.Retention.history:
                continue
            tokens = group.entries_per_block * group.compress_ratio
            blocks = self.blocks(replay.donor, group, 0, p)
            whole = p // tokens
            cache.block_tables[group.name][row, :whole] = torch.tensor(blocks[:whole], dtype=torch.int32)
            own = request.sequence.block_table(group.name)[whole : whole + 1]
            if stored and len(blocks) > whole and len(own):  # p inside a block: the rest of it is the request's
                self.part(int(own[0]), group.block_bytes).copy_(self.part(blocks[whole], group.block_bytes))
            cache.slots[group.name][first : first + stored] = self.cache.scratch_block(group.name) * group.entries_per_block

    @torch.no_grad()
    def run(self, requests: list[AttachedRequest | Replay], counts: list[int]) -> list[Tensor]:
        """One packed pass. Returns the logits of all its tokens, by request."""
        running = [one.request if isinstance(one, Replay) else one for one in requests]
        with self.attached.step(running, counts) as step:
            for row, (one, count) in enumerate(zip(requests, counts, strict=True)):
                if isinstance(one, Replay):
                    self.prepare(step.inputs["cache"], row, sum(counts[:row]), count, one)
            logits: Tensor = self.model(**step.inputs).logits[0].float()
        return list(logits.split(counts))

    def error(self, replay: Replay) -> float:
        """Replays and goes on past p, the last 20 tokens one at a time. The largest difference of a kept logit."""
        p, request, end, worst = replay.p, replay.request, replay.p + BEYOND, 0.0
        with replay:
            history = self.history(replay)
            while request.length < end:
                begin = request.length
                count = min(request.next_chunk(BLOCK if begin < end - 20 else 1), end - begin)
                logits = self.run([replay], [count])[0]
                kept = slice(max(begin, p), begin + count)
                if kept.start < kept.stop:
                    worst = max(worst, float((logits[kept.start - begin :] - self.expected[kept]).nan_to_num(1e9).abs().max()))
            for before, after in zip(history, self.history(replay), strict=True):
                assert torch.equal(before, after)  # the stored history was not written
            return worst

    def history(self, replay: Replay) -> list[Tensor]:
        """Copies of the donor's blocks below p."""
        groups = [group for group in self.cache.layout.groups if group.retention is hetkv.Retention.history]
        return [self.part(b, g.block_bytes).clone() for g in groups for b in self.blocks(replay.donor, g, 0, replay.p)]

    def close(self) -> None:
        self.attached.detach()


def build(name: str, changes: dict[str, Any]) -> nn.Module:
    if not changes:
        return BUILDERS[name]()
    model: nn.Module = transformers.DeepseekV4ForCausalLM(tiny_config(name, VOCABULARY, **changes))
    draw_weights(model, 0)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model.eval()


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[Any, World]]:
    made: dict[Any, World] = {}
    yield made
    for world in made.values():
        world.close()


def world_of(worlds: dict[Any, World], name: str, changes: Changes = STOCK) -> World:
    key = (name, repr(changes))
    if key not in worlds:
        worlds[key] = World(name, changes, 848 if not changes else 400)
    return worlds[key]


@pytest.mark.parametrize(("name", "changes", "p", "distance"), CASES)
def test_history_alone_is_enough_and_one_token_less_is_not(
    worlds: dict[Any, World], name: str, changes: Changes, p: int, distance: int
) -> None:
    """Plan D."""
    world = world_of(worlds, name, changes)
    assert world.error(world.replaying(p - distance, p)) <= BOUND
    assert world.error(world.replaying(p - distance + 1, p)) > VISIBLE


@pytest.mark.parametrize("p", [640, 701, 576])
def test_windows_without_tails_are_enough(worlds: dict[Any, World], p: int) -> None:
    """Plan B: the windows at s are there, rings are rebuilt from the raw rows that p still needs, and no later."""
    world = world_of(worlds, "deepseek_v4")
    s = min(p // 4 * 4 - 4, p // 128 * 128)
    assert world.error(world.replaying(s, p, windows=True)) <= BOUND
    assert world.error(world.replaying(s + 1, p, windows=True)) > VISIBLE


@pytest.mark.parametrize("name", ["deepseek_v4", "gpt_oss", "gemma3"])
@pytest.mark.parametrize("s", [512, 320, 449])
def test_an_older_checkpoint_and_newer_history(worlds: dict[Any, World], name: str, s: int) -> None:
    """Plan C: all point groups at s, history up to p. Nothing is thrown away then, and every s will do."""
    world = world_of(worlds, name)
    assert world.error(world.replaying(s, 640, windows=True, tails=True)) <= BOUND


@pytest.mark.parametrize("name", ["deepseek_v4", "gpt_oss", "gemma3"])
def test_a_replay_beside_others_and_a_pass_that_crosses_p(worlds: dict[Any, World], name: str) -> None:
    """One request replays, one decodes, one computes its prompt, in one pass; chunks end anywhere, one on either side of p."""
    world, p = world_of(worlds, name), 600
    decoding, cold, end = world.open(), world.open(), p + BEYOND
    world.run_to(decoding, 300)
    with decoding, cold, world.replaying(p - 508, p) as replay:
        while replay.request.length < end:
            begins = [decoding.length, replay.request.length, cold.length]
            counts = [1, min(37, end - begins[1]), 23]
            for begin, low, logits in zip(begins, (0, p, 0), world.run([decoding, replay, cold], counts), strict=True):
                kept = slice(max(begin, low), begin + len(logits))
                if kept.start < kept.stop:
                    rows = logits[kept.start - begin :]
                    assert float((rows - world.expected[kept]).abs().max()) <= BOUND
                    assert torch.equal(rows.argmax(-1), world.expected[kept].argmax(-1))


def test_rings_start_without_what_an_earlier_request_left(worlds: dict[Any, World]) -> None:
    """A tail that R(p) does not ask for, or that a replay rebuilds, starts as zeros: nothing that is not finite gets in."""
    world = world_of(worlds, "deepseek_v4")
    with world.open() as first:
        world.poison(first, 0)
        used = {name: first.sequence.live_block(name) for name in ("csa_tail", "csa_index_tail", "hca_tail")}
    with world.open() as second:
        for name, block in used.items():
            group = world.cache.layout.group(name)
            ring = second.sequence.live_block(name)
            assert ring is not None
            assert ring == block  # the same memory: the test would show nothing otherwise
            assert not bool(world.part(ring, group.ring_block_bytes).any())
