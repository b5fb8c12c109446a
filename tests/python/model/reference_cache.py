"""The rules of the cache, as plainly as they can be said: dictionaries, counts and searches over everything. No hetkv here.

It has no memory limit: nothing is ever evicted unless asked. Objects hang on nodes; a node is one block of one prefix in one
version and one life of a namespace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from .plain_layout import PlainGroup, PlainLayout

__all__ = ["Loss", "Pin", "ReferenceCache", "ReferenceSequence", "Report", "Stamp", "Version"]

NEVER = 1 << 60


class Version(NamedTuple):
    layout: int
    abi: int
    model: str


class Loss(NamedTuple):
    reason: str
    group: str | None
    tokens: int


class Report(NamedTuple):
    prompt: int
    hash_hit: int
    history: int
    recoverable: int
    losses: tuple[Loss, ...]


class Stamp(NamedTuple):
    epoch: int
    version: Version
    begin: int
    end: int


Prefix = tuple[int, ...]
Key = tuple[Version, int, Prefix]  # version, life of the namespace, tokens


@dataclass(eq=False)
class Point:
    canonical: bool
    broken: bool = False
    pins: int = 0


@dataclass(eq=False)
class Node:
    key: Key
    parent: Node | None
    depth: int
    canonical: bool  # it and its ancestors were computed in chunks of one whole block each
    broken: bool = False
    pins: int = 0
    kids: int = 0
    points: dict[str, Point] = field(default_factory=dict)
    ever: set[str] = field(default_factory=set)  # point groups once published here
    quarantined: dict[str, str] = field(default_factory=dict)  # why, by point group, until it is published again

    @property
    def idle(self) -> bool:
        return self.pins == 0 and self.kids == 0

    def has(self, group: str) -> bool:
        return group in self.points and not self.points[group].broken


class BrokenRecord(NamedTuple):
    version: Version
    reason: str
    group: str


class ReferenceCache:
    """retention: as the cache's. Prompts are tuples of token ids; namespaces are names."""

    def __init__(self, layout: PlainLayout, retention: str, version: Version) -> None:
        self.layout = layout
        self.retention = retention
        self.version = version
        self.lives: dict[str, int] = {}
        self.next_life = 0
        self.index: dict[Key, Node] = {}  # what can be matched
        self.nodes: list[Node] = []  # what takes memory: broken ones in use too
        self.lost: dict[tuple[int, Prefix], BrokenRecord] = {}
        self.evicted: set[tuple[int, Prefix]] = set()
        self.sequences: list[ReferenceSequence] = []
        self.published_nodes = 0
        self.found_equal = 0
        self.totals = {"prompt_tokens": 0, "hash_hit_tokens": 0, "recoverable_tokens": 0}
        self.lost_tokens: dict[str, int] = {}

    def life(self, space: str) -> int:
        if space not in self.lives:
            self.lives[space] = self.next_life
            self.next_life += 1
        return self.lives[space]

    # --- what a prompt can resume from ---

    def chain(self, prompt: Prefix, space: str, version: Version | None = None) -> list[Node]:
        """Nodes of the prefix in one version, root first, up to the first gap."""
        b = self.layout.block_size
        found = []
        for depth in range(1, len(prompt) // b + 1):
            node = self.index.get((version or self.version, self.life(space), prompt[: depth * b]))
            if node is None:
                break
            found.append(node)
        return found

    def complete(self, chain: list[Node], depth: int, groups: list[PlainGroup]) -> bool:
        return all(chain[d - 1].has(g.name) for g in groups for d in self.layout.objects(g, depth))

    def largest(self, chain: list[Node], depth: int, groups: list[PlainGroup]) -> int:
        """The deepest endpoint at or above ``depth`` whose R(p) is complete in the groups; 0 always is."""
        return max(d for d in range(depth + 1) if self.complete(chain, d, groups))

    def probe(self, prompt: Prefix, space: str, *, keep_last_token: bool = True) -> Report:
        b = self.layout.block_size
        full = len(prompt) // b
        chain = self.chain(prompt, space)
        history = len(chain)

        # Known at all, in whatever version; then in this layout; with this ABI; in this version.
        known = {"any": history, "layout": history, "abi": history, "model": history}

        def see(version: Version, depth: int) -> None:
            known["any"] = max(known["any"], depth)
            if version.layout == self.version.layout:
                known["layout"] = max(known["layout"], depth)
                if version.abi == self.version.abi:
                    known["abi"] = max(known["abi"], depth)

        for version in {node.key[0] for node in self.index.values()}:
            see(version, len(self.chain(prompt, space, version)))
        broken = None
        for depth in range(full, history, -1):
            record = self.lost.get((self.life(space), prompt[: depth * b]))
            if record is not None:
                see(record.version, depth)
                if record.version == self.version:
                    known["model"] = max(known["model"], depth)
                    broken = record
                break

        losses = []

        def lose(reason: str, group: str | None, blocks: int) -> None:
            if blocks > 0:
                losses.append(Loss(reason, group, blocks * b))

        if len(prompt) % b:
            losses.append(Loss("granularity", None, len(prompt) % b))
        seen = known["any"]
        was_here = (self.life(space), prompt[: (seen + 1) * b]) in self.evicted
        lose("evicted" if was_here else "not_found", None, full - seen)
        lose("layout", None, seen - known["layout"])
        lose("abi", None, known["layout"] - known["abi"])
        lose("model_version", None, known["abi"] - known["model"])
        if broken is not None:
            lose(broken.reason, broken.group, known["model"] - history)

        end = history
        points = self.layout.points
        for k, group in enumerate(points):
            below = self.largest(chain, end, points[: k + 1])
            if below < end:
                lose(self.blame(chain, end, below, group), group.name, end - below)
            end = below
        last = (len(prompt) - 1) // b
        if keep_last_token and end > last:
            below = self.largest(chain, last, points)
            lose("last_token", None, end - below)
            end = below
        return Report(len(prompt), seen * b, history * b, end * b, tuple(losses))

    def blame(self, chain: list[Node], end: int, below: int, group: PlainGroup) -> str:
        """Why the group is incomplete at ``end``: its deepest missing object was quarantined, evicted, or never made."""
        missing = next(d for d in self.layout.objects(group, end) if not chain[d - 1].has(group.name))
        if group.name in chain[missing - 1].quarantined:
            return chain[missing - 1].quarantined[group.name]
        was_there = group.name in chain[missing - 1].ever
        if group.retention == "window":
            return "window_evicted" if was_there else "group_missing"
        if group.retention == "snapshot":
            return "snapshot_evicted" if was_there else "group_missing"
        if was_there:
            return "tail_evicted"
        return "tail_misaligned" if below > 0 else "group_missing"

    # --- pins ---

    def pin_at(self, prompt: Prefix, space: str, tokens: int) -> Pin:
        """Pins on everything that R(tokens) names."""
        depth = tokens // self.layout.block_size
        pin = Pin(self)
        chain = self.chain(prompt, space)[:depth]
        if chain:
            pin.move_to(chain[-1])
        for group in self.layout.points:
            for d in self.layout.objects(group, depth):
                pin.add(group.name, d, chain[d - 1])
        return pin

    def pin_prefix(self, prompt: Prefix, space: str) -> Pin:
        tokens = self.probe(prompt, space, keep_last_token=False).recoverable
        pin = self.pin_at(prompt, space, tokens)
        pin.tokens = tokens
        return pin

    def unpin_node(self, node: Node) -> None:
        node.pins -= 1
        self.reap(node)

    def unpin_point(self, node: Node, group: str) -> None:
        point = node.points[group]
        point.pins -= 1
        if point.broken and point.pins == 0:
            del node.points[group]

    # --- eviction, quarantine ---

    def reap(self, node: Node | None) -> None:
        """A broken node goes when nobody needs it, and then perhaps its parent."""
        while node is not None and node.broken and node.idle:
            node = self.remove(node)

    def remove(self, node: Node) -> Node | None:
        assert node.idle
        assert all(point.pins == 0 for point in node.points.values())
        self.nodes.remove(node)
        if self.index.get(node.key) is node:
            del self.index[node.key]
        self.evicted.add(node.key[1:])
        if node.parent is not None:
            node.parent.kids -= 1
        return node.parent

    def evict_node(self, node: Node) -> bool:
        if node.broken or not node.idle:
            return False
        self.reap(self.remove(node))
        return True

    def candidates(self, kind: str) -> list[tuple[Node, str]]:
        """Single objects of a kind that could be evicted now; group "" for a node's history."""
        found = []
        for group in self.layout.points:
            if group.kind == kind:
                found += [(n, group.name) for n in self.nodes if n.has(group.name) and n.points[group.name].pins == 0]
        if any(g.kind == kind for g in self.layout.history):
            found += [(n, "") for n in self.nodes if not n.broken and n.idle]
        return found

    def evict_one(self, node: Node, group: str) -> None:
        if group:
            del node.points[group]
        else:
            assert self.evict_node(node)

    @contextmanager
    def without(self, node: Node, group: str) -> Iterator[None]:
        """As if this object had been evicted."""
        if group:
            point = node.points.pop(group)
            yield
            node.points[group] = point
        else:
            found = self.index.pop(node.key, None)
            yield
            if found is not None:
                self.index[node.key] = found

    def evict_all(self, kind: str) -> int:
        """Everything of a kind that nobody uses, leaves first."""
        gone = 0
        while found := self.candidates(kind):
            for node, group in found:
                self.evict_one(node, group)
                gone += 1
        return gone

    def evict_object(self, prompt: Prefix, position: int, group: PlainGroup, space: str) -> bool:
        node = self.index.get((self.version, self.life(space), prompt[:position]))
        if node is None:
            return False
        if group.retention == "history":
            return self.evict_node(node)
        if not node.has(group.name) or node.points[group.name].pins:
            return False
        del node.points[group.name]
        return True

    def quarantine(self, prompt: Prefix, position: int, group: PlainGroup, reason: str, space: str) -> int:
        top = self.index.get((self.version, self.life(space), prompt[:position]))
        if top is None:
            return 0
        if group.retention != "history":
            if not top.has(group.name):
                return 0
            top.points[group.name].broken = True
            top.quarantined[group.name] = reason
            if top.points[group.name].pins == 0:
                del top.points[group.name]
            return 1
        marked = [node for node in self.nodes if not node.broken and self.is_below(node, top)]
        for node in marked:
            node.broken = True
            del self.index[node.key]
            self.lost[node.key[1:]] = BrokenRecord(self.version, reason, group.name)
        for node in sorted(marked, key=lambda n: -n.depth):
            if node in self.nodes:
                self.reap(node)
        return len(marked)

    def is_below(self, node: Node | None, top: Node) -> bool:
        while node is not None and node is not top:
            node = node.parent
        return node is top

    def clear(self, space: str) -> int:
        """The namespace starts a new life; what the old one left is evicted, leaves first, unless it is in use."""
        old = self.life(space)
        del self.lives[space]
        self.life(space)
        gone = 0
        while found := [n for n in self.nodes if n.key[1] == old and not n.broken and n.idle]:
            for node in found:
                gone += self.evict_node(node)
        return gone

    # --- requests ---

    def admit(self, prompt: Prefix, space: str) -> ReferenceSequence:
        report = self.probe(prompt, space)
        self.totals["prompt_tokens"] += report.prompt
        self.totals["hash_hit_tokens"] += report.hash_hit
        self.totals["recoverable_tokens"] += report.recoverable
        for loss in report.losses:
            self.lost_tokens[loss.reason] = self.lost_tokens.get(loss.reason, 0) + loss.tokens
        sequence = ReferenceSequence(self, prompt, space, report)
        self.sequences.append(sequence)
        return sequence

    def publish_node(self, key: Key, parent: Node | None, depth: int, canonical: bool) -> Node | str:
        """The node, or why there is none."""
        found = self.index.get(key)
        if found is not None:
            if found.parent is not parent:
                return "busy"  # ours broke, and another published the prefix anew
            self.found_equal += 1
            return found
        if parent is not None:
            if parent.broken:
                return "unpublishable"
            parent.kids += 1
        node = Node(key, parent, depth, canonical and (parent is None or parent.canonical))
        self.nodes.append(node)
        self.index[key] = node
        self.lost.pop(key[1:], None)
        self.published_nodes += 1
        return node

    def live_blocks(self, group: PlainGroup) -> int:
        """Blocks in use, without the scratch block. For windows only while no sequence runs: those keep spare ones."""
        if group.retention == "history":
            held = sum(self.layout.has_block(group, node.depth) for node in self.nodes)
            return held + sum(seq.private[group.name] for seq in self.sequences)
        held = sum(group.name in node.points for node in self.nodes)
        return held + sum(group.name in point.staged for seq in self.sequences for point in seq.pending)


class Pin:
    """Pins of one request: one on its deepest node, one on every point object that is still read."""

    def __init__(self, cache: ReferenceCache) -> None:
        self.cache = cache
        self.deepest: Node | None = None
        self.points: list[tuple[str, int, Node]] = []
        self.tokens = 0

    def move_to(self, node: Node | None) -> None:
        if node is not None:
            node.pins += 1
        if self.deepest is not None:
            self.cache.unpin_node(self.deepest)
        self.deepest = node

    def add(self, group: str, depth: int, node: Node) -> None:
        node.points[group].pins += 1
        self.points.append((group, depth, node))

    def drop(self, group: str, depth: int) -> None:
        for entry in self.points:
            if entry[:2] == (group, depth):
                self.points.remove(entry)
                self.cache.unpin_point(entry[2], group)
                return

    @property
    def canonical(self) -> bool:
        fine = self.deepest is None or self.deepest.canonical
        return fine and all(node.points[group].canonical for group, _, node in self.points)

    @property
    def ok(self) -> bool:
        fine = self.deepest is None or not self.deepest.broken
        return fine and all(node.has(group) for group, _, node in self.points)

    def release(self) -> None:
        for group, _, node in self.points:
            self.cache.unpin_point(node, group)
        self.points.clear()
        self.move_to(None)


@dataclass(eq=False)
class Pending:
    """A checkpoint on its way. staged: groups that have a block for it; proved: those whose state was committed."""

    depth: int
    rolling: bool
    staged: set[str]
    proved: set[str] = field(default_factory=set)


class ReferenceSequence:
    """One request. Windows: by group, which blocks (by index) it still has, and whether they are its own or shared."""

    def __init__(self, cache: ReferenceCache, prompt: Prefix, space: str, report: Report) -> None:
        layout = cache.layout
        self.cache = cache
        self.space = space
        self.life = cache.life(space)
        self.version = cache.version
        self.report = report
        self.tokens = list(prompt)
        self.resume = report.recoverable
        self.scheduled = self.settled = self.covered = self.resume
        self.published = self.resume // layout.block_size
        self.accepted: int | None = None
        self.epoch = 1
        self.foreign_from = NEVER
        self.publishable = True
        self.chain = cache.chain(prompt, space)[: self.published]
        self.pin = cache.pin_at(prompt, space, self.resume)
        self.canonical = self.pin.canonical
        self.canonical_depth = self.published if self.canonical else 0  # our rows up to here came one block at a time
        self.private = {g.name: 0 for g in layout.history}
        self.windows: dict[str, dict[int, str]] = {}
        for g in layout.points:
            if g.retention == "window":
                self.windows[g.name] = {d - 1: "shared" for d in layout.objects(g, self.published)}
        self.pending: list[Pending] = []
        self.last_whole = (len(prompt) - 1) // layout.block_size  # the last block that the same prompt again could resume at
        self.branch = report.history // layout.block_size if report.history > report.recoverable else 0

    @property
    def safe(self) -> int:
        return self.settled if self.accepted is None else min(self.accepted, self.settled)

    # --- steps ---

    def schedule(self, upto: int) -> Stamp:
        layout = self.cache.layout
        if upto > self.covered:
            covered = -(-upto // layout.block_size) * layout.block_size
            for group in layout.groups:
                before, after = layout.table_blocks(group, self.covered), layout.table_blocks(group, covered)
                if group.retention == "history":
                    self.private[group.name] += after - before
                elif group.retention == "window":
                    self.windows[group.name] |= dict.fromkeys(range(before, after), "private")
            self.covered = covered
        stamp = Stamp(self.epoch, self.cache.version, self.scheduled, upto)
        self.scheduled = upto
        return stamp

    def settle(self, stamp: Stamp) -> bool:
        if stamp.epoch != self.epoch:
            return False
        if stamp.version != self.version and stamp.begin < self.foreign_from:
            self.foreign_from = stamp.begin
            self.drop_points_beyond(self.foreign_from)
        b = self.cache.layout.block_size
        if (stamp.begin, stamp.end) == (self.canonical_depth * b, (self.canonical_depth + 1) * b):
            self.canonical_depth += 1
        before = self.safe
        self.settled = max(self.settled, stamp.end)
        self.advance(before)
        return True

    def accept(self, upto: int) -> None:
        before = self.safe
        self.accepted = max(self.accepted or 0, upto)
        self.advance(before)

    def restart(self) -> None:
        self.epoch += 1
        self.scheduled = self.settled
        self.drop_points_beyond(self.settled)

    def may_publish(self, position: int) -> bool:
        return self.publishable and position <= self.foreign_from and self.cache.life(self.space) == self.life

    def drop_points_beyond(self, position: int) -> None:
        self.pending = [point for point in self.pending if point.depth * self.cache.layout.block_size <= position]

    def advance(self, before: int) -> None:
        b = self.cache.layout.block_size
        first, last = before // b + 1, self.safe // b
        if last < first:
            return
        for depth in range(first, last + 1):
            # A boundary where no state has to be handed over is a checkpoint by itself.
            free = self.may_publish(depth * b) and not self.staged_groups(depth) and not self.find(depth)
            if self.cache.layout.points and free and self.want(depth) != "no":
                rolling = self.want(depth) == "rolling"
                self.pending.append(Pending(depth, rolling, set()))
                if rolling:
                    self.keep_rolling(depth)
        self.slide()

    def slide(self) -> None:
        layout = self.cache.layout
        for group in layout.points:
            if group.retention != "window":
                continue
            mine = self.windows[group.name]
            needed = {row // layout.block_size for row in layout.rows(group, self.safe)}
            for point in self.pending:
                needed |= {d - 1 for d in layout.objects(group, point.depth)}
            for i in list(mine):
                if i in needed or (i + 1) * layout.block_size > self.safe:
                    continue
                if mine.pop(i) == "shared":
                    self.pin.drop(group.name, i + 1)

    # --- checkpoints ---

    def want(self, depth: int) -> str:
        """ "publish", "rolling" (only if the turn ends here) or "no". For conversations below 512 tokens."""
        retention = self.cache.retention
        if retention == "all":
            return "publish"
        if retention == "none":
            return "no"
        if retention.startswith("every("):
            return "publish" if depth * self.cache.layout.block_size % int(retention[6:-1]) == 0 else "no"
        if depth == self.last_whole:
            return "publish"
        if retention == "adaptive" and depth == self.branch:
            return "publish"
        return "rolling" if depth > self.last_whole else "no"

    def wants_point(self, position: int) -> bool:
        depth, rest = divmod(position, self.cache.layout.block_size)
        wanted = bool(self.cache.layout.points) and rest == 0 and position > self.resume and self.want(depth) != "no"
        return wanted and self.may_publish(position)

    def staged_groups(self, depth: int) -> set[str]:
        return {g.name for g in self.cache.layout.staged if self.cache.layout.objects(g, depth)}

    def find(self, depth: int) -> Pending | None:
        return next((point for point in self.pending if point.depth == depth), None)

    def keep_rolling(self, depth: int) -> None:
        self.pending = [point for point in self.pending if not point.rolling or point.depth == depth]

    def stage(self, position: int) -> set[str]:
        """The groups that got a block."""
        depth = position // self.cache.layout.block_size
        point = self.find(depth)
        if point is None:
            groups = self.staged_groups(depth)
            if self.want(depth) == "no" or not groups or not self.may_publish(position):
                return set()
            rolling = self.want(depth) == "rolling"
            if rolling:
                self.keep_rolling(depth)
            point = Pending(depth, rolling, groups)
            self.pending.append(point)
        return set(point.staged)

    def commit(self, position: int) -> None:
        point = self.find(position // self.cache.layout.block_size)
        assert point is not None
        point.proved = set(point.staged)

    # --- publication ---

    def publish(self, upto: int = NEVER) -> tuple[int, str]:
        b = self.cache.layout.block_size
        if self.cache.life(self.space) != self.life:
            self.publishable = False
        if not self.publishable:
            self.drop_points_beyond(0)
            self.slide()
            return self.published * b, "unpublishable"
        outcome = "foreign_version" if upto > self.foreign_from else "done"
        while self.published < min(upto, self.safe, self.foreign_from) // b:
            depth = self.published + 1
            key = (self.version, self.life, tuple(self.tokens[: depth * b]))
            known = key in self.cache.index
            node = self.cache.publish_node(key, self.pin.deepest, depth, depth <= self.canonical_depth)
            if isinstance(node, str):
                outcome = node
                self.publishable = node != "unpublishable"
                break
            if not known:  # its blocks are the node's now
                for group in self.cache.layout.history:
                    self.private[group.name] -= self.cache.layout.has_block(group, depth)
            self.pin.move_to(node)
            self.chain.append(node)
            self.published = depth
        if self.pending:
            self.publish_due(turn_end=False)
            self.slide()
        if not self.publishable and self.pending:
            self.drop_points_beyond(0)
            self.slide()
        return self.published * b, outcome

    def publish_due(self, turn_end: bool) -> None:
        for point in sorted(self.pending, key=lambda point: point.depth):
            if (point.rolling and not turn_end) or point.depth > self.published:
                continue
            self.publish_point(point)
            self.pending.remove(point)

    def publish_point(self, point: Pending) -> None:
        """All of a checkpoint or nothing: every proof is there, and every window block that nobody published is still ours."""
        layout = self.cache.layout
        windows = [
            (group.name, d, self.chain[d - 1])
            for group in layout.points
            if group.retention == "window"
            for d in layout.objects(group, point.depth)
        ]
        if point.proved != point.staged:
            return
        if not all(node.has(group) or self.windows[group].get(d - 1) == "private" for group, d, node in windows):
            return
        for group, d, node in windows:
            if self.windows[group].get(d - 1) == "private" and group not in node.points:
                node.points[group] = Point(d <= self.canonical_depth)
                node.ever.add(group)
                node.quarantined.pop(group, None)
                self.pin.add(group, d, node)
                self.windows[group][d - 1] = "shared"
        node = self.chain[point.depth - 1]
        for group in point.staged:
            if group not in node.points:
                node.points[group] = Point(point.depth <= self.canonical_depth)
                node.ever.add(group)
                node.quarantined.pop(group, None)

    def free(self, turn_end: bool) -> None:
        if turn_end:
            self.publish(self.safe)
            if self.publishable:
                self.publish_due(turn_end=True)
        self.cache.sequences.remove(self)
        self.pin.release()
