"""The cache: one arena, typed groups, and the index of what can be resumed from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from . import _core
from .arena_rows import ArenaRows, SlotInput
from .byte_size import byte_size
from .errors import ArgumentError
from .report import HitReport, LossReason
from .sequence import Sequence
from .step_buffers import StepBuffers
from .tiers import DiskTier, HostTier
from .tokens import TokenInput, as_token_ids

__all__ = ["Cache"]

_ALIGNMENT = 256  # bytes: block offsets count in these


class Cache:
    """A typed KV cache over one arena.

    All methods may be called from several threads; those that search, reserve or evict release the GIL. Tokens are int32 numpy
    arrays or int32 CPU torch tensors, which are read in place; other integers and lists are converted (``hetkv.tokens``).
    Groups are given by name or id, kinds by name. Sizes are bytes or text such as "256MiB". Positions are tokens.
    """

    def __init__(
        self,
        layout: _core.CacheLayout,
        capacity: int | str,
        device: str | torch.device = "cpu",
        *,
        model_version: str = "0",
        abi: Mapping[str, int] | None = None,
        retention: str = "adaptive",
        floors: Mapping[str, int] | None = None,
        caps: Mapping[str, int | str] | None = None,
        verify_tokens: Literal["all", "deepest"] = "all",
        secret: int | None = None,
        lock_free: bool = True,
        max_nodes: int = 0,
        slab_bytes: int | str = 0,
        pin_prefix_cap: int | str | None = None,
        host: HostTier | int | str | None = None,
        disk: DiskTier | str | os.PathLike[str] | None = None,
    ) -> None:
        """
        layout: of the model; the dtypes of the rows come from it.
        capacity: bytes of the arena; rounded down to whole slabs.
        model_version: name of the weights. abi: kernel family to integer; both are part of what a hit must match.
        retention: which positions get checkpoints: "all", "every(N)", "turn_ends", "none" or "adaptive".
        floors: kind to slabs that are always available to it. caps: kind to a size that its blocks never exceed.
        verify_tokens: compare the tokens of every matched block, or only of the deepest.
        secret: of the prefix hash; None draws one. A fixed one (not 0) is for tests.
        lock_free: False takes the locked twin of the reservation, for bisecting.
        max_nodes: blocks of prefixes that can be indexed; 0: from the capacity. slab_bytes: 0: from the block sizes.
        pin_prefix_cap: most that pinned prefixes may hold; None: a quarter of the arena.
        host: a tier in host memory, or its capacity. disk: a tier on disk, or its folder. Prefixes go down to them and come back;
        with a disk tier they outlive the process, and `secret` is the folder's. On CPU devices only.

        LayoutError, ArgumentError for sizes and names, AdmissionError if the floors, or one block of every group, do not fit.
        """
        bytes_asked = byte_size(capacity, "capacity")
        if verify_tokens not in ("all", "deepest"):
            raise ArgumentError("verify_tokens", repr(verify_tokens), "'all' or 'deepest'")
        if secret is not None and not 0 < secret < 2**64:
            raise ArgumentError("secret", str(secret), "None for a random one, or 1 to 2**64 - 1")
        self._layout = layout
        self._ids: dict[str | int, int] = {group.name: group.id for group in layout.groups}
        self._ids |= {group.id: group.id for group in layout.groups}
        self._names = tuple(group.name for group in layout.groups)
        self._caps = {_kind_name(kind): byte_size(cap, f"caps[{kind!r}]") for kind, cap in (caps or {}).items()}
        self._floors = {_kind_name(kind): slabs for kind, slabs in (floors or {}).items()}
        for kind, slabs in self._floors.items():
            if not 0 <= slabs < 2**32:
                raise ArgumentError(f"floors[{kind!r}]", str(slabs), "a number of slabs")
        if not 0 <= max_nodes < 2**28:
            raise ArgumentError("max_nodes", str(max_nodes), "0 to 2**28")

        host = HostTier(host) if isinstance(host, int | str) else host
        disk = DiskTier(disk) if isinstance(disk, str | os.PathLike) else disk
        if (host or disk) and torch.device(device).type != "cpu":
            raise ArgumentError("device", str(device), "'cpu': tiers below other devices are not built yet")
        if disk and secret is not None:
            raise ArgumentError("secret", "given with a disk tier", "None: the folder has its own")

        memory = _allocate(bytes_asked, torch.device(device))
        host_memory = _allocate(host.num_bytes, torch.device("cpu")) if host else None
        self._core = _core.Allocator(
            layout,
            bytes_asked,
            base_address=memory.data_ptr(),
            slab_bytes=0 if slab_bytes == 0 else byte_size(slab_bytes, "slab_bytes"),
            floors=self._floors,
            caps=self._caps,
            retention=retention,
            verify_all_tokens=verify_tokens == "all",
            model_version=model_version,
            abi=dict(abi or {}),
            hash_seed=secret or 0,
            lock_free=lock_free,
            max_nodes=max_nodes,
            pin_prefix_cap_bytes=0 if pin_prefix_cap is None else byte_size(pin_prefix_cap, "pin_prefix_cap"),
            host=host.to_core(host_memory.data_ptr()) if host and host_memory is not None else None,
            disk=disk.to_core() if disk else None,
            memory=(memory, host_memory),
        )
        self._arena = memory[: self._core.arena_bytes()]
        self._rows = ArenaRows(layout, self._arena)
        self._default = self._core.namespace_([])

    # --- what it is ---

    @property
    def layout(self) -> _core.CacheLayout:
        """The layout that it was made with."""
        return self._layout

    @property
    def arena(self) -> Tensor:
        """uint8 [bytes]: all blocks of all groups; its address is a multiple of 256."""
        return self._arena

    @property
    def device(self) -> torch.device:
        """Where the arena is."""
        return self._arena.device

    @property
    def retention(self) -> str:
        """The retention policy, as text."""
        return self._core.retention()

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups; the id of a group is its place."""
        return self._names

    def group_id(self, group: str | int) -> int:
        """The id of a group given by name or id; ArgumentError if there is none."""
        found = self._ids.get(group)
        if found is None:
            raise ArgumentError("group", repr(group), f"one of {', '.join(self._names)}")
        return found

    # --- identity ---

    def namespace(self, salt: str = "", adapter: str = "", digests: Iterable[str | bytes] = ()) -> _core.Namespace:
        """Who may share with whom: equal fields give the same namespace, and no two fields can be mistaken for one another.

        salt: of the caller. adapter: its name and version. digests: of the prompt's images and other media, in order. Empty
        fields say nothing: the namespace of none is the default one.
        """
        fields: list[tuple[str, str | bytes]] = [("salt", salt), ("adapter", adapter)]
        fields += [(f"digest:{i}", digest) for i, digest in enumerate(digests)]
        return self._core.namespace_([(tag, value) for tag, value in fields if value])

    @property
    def model_version(self) -> str:
        """Name of the running weights."""
        return self._core.model_version()

    def set_model_version(self, name: str) -> None:
        """Other weights run from now on: entries of the old ones stop matching at once, and match again if they come back."""
        self._core.set_model_version(name)

    @property
    def abi(self) -> dict[str, int]:
        """The ABI integer of every kernel family."""
        return self._core.abi()

    def set_abi(self, family: str, value: int) -> None:
        """A kernel family that reads or writes the bytes has changed: what the old one wrote stops matching."""
        if not 0 <= value < 2**64:
            raise ArgumentError("value", str(value), "0 to 2**64 - 1")
        self._core.set_abi(family, value)

    def declare_alignment(self, family: str, alignment: int) -> None:
        """A kernel family needs every block at a multiple of ``alignment`` bytes, a power of two.

        It is part of the layout fingerprint: entries written before stop matching. LayoutError if blocks cannot have it.
        """
        if not 0 < alignment < 2**63:
            raise ArgumentError("alignment", str(alignment), "a power of two")
        self._core.declare_alignment(family, alignment)

    def set_quota(self, namespace: _core.Namespace, quota: int | str | None) -> None:
        """The most that a namespace's sequences and objects may hold together; None lifts it."""
        self._core.set_quota(namespace, 2**64 - 1 if quota is None else byte_size(quota, "quota"))

    def clear(self, namespace: _core.Namespace | None = None) -> int:
        """All entries of a namespace stop matching at once. Returns how many prefix blocks went; what is in use goes later."""
        return self._core.clear(self._space(namespace))

    # --- requests ---

    def probe(
        self, tokens: TokenInput, namespace: _core.Namespace | None = None, *, previous: _core.HashedPrefix | None = None
    ) -> HitReport:
        """How far a prompt could resume now, and why no further. A forecast: pins nothing, refreshes nothing."""
        return HitReport.from_core(self._core.probe(as_token_ids(tokens), self._space(namespace), previous))

    def admit(
        self,
        tokens: TokenInput,
        namespace: _core.Namespace | None = None,
        *,
        max_new_tokens: int = 0,
        chunk_tokens: int | None = None,
        live_state: bool = False,
        previous: _core.HashedPrefix | None = None,
        restore: Literal["wait", "async", "none"] = "wait",
    ) -> Sequence:
        """Starts a request: pins what it resumes from and reserves the blocks it will write, in one step.

        max_new_tokens: blocks for so many generated tokens are reserved at once. chunk_tokens: the largest step, from which the
        blocks of windows follow; None: block_size. live_state: also reserve a running ring for every tail group and a running
        state for every snapshot group. previous: ``Sequence.hashed_prefix`` of the conversation so far.

        restore: what lies on lower tiers is loaded first: "wait" returns when it is; "async" returns at once a sequence that
        can be waited for, awaited, polled or given a callback (``Sequence.ready``), and freed at any moment; "none" loads
        nothing. What cannot be loaded is computed instead, and the report says why.

        AdmissionError, with kind, need, cap and retryable, changes nothing. ArgumentError for tokens and numbers out of range.
        """
        if restore not in ("wait", "async", "none"):
            raise ArgumentError("restore", repr(restore), "'wait', 'async' or 'none'")
        core = self._core.admit(
            as_token_ids(tokens),
            self._space(namespace),
            max_new_tokens,
            chunk_tokens or 0,
            live_state,
            previous,
            restore != "none",
        )
        if restore == "wait":
            core.wait()
        return Sequence(self, core)

    def prepare_step(
        self,
        sequences: ListLike[Sequence],
        num_tokens: ListLike[int],
        buffers: StepBuffers,
        *,
        padded_sequences: int | None = None,
        padded_tokens: int | None = None,
    ) -> list[_core.StepStamp]:
        """Schedules ``num_tokens[i]`` more tokens of every sequence, or none of them, and fills the buffers in place.

        padded_sequences, padded_tokens: how much of the buffers to fill; default: all. The rest keeps what it held. Returns a
        stamp per sequence, for ``Sequence.settle``. AdmissionError changes nothing. ArgumentError: a sequence twice, freed, or
        of another cache; more tokens than known; buffers that are too small.
        """
        stamps = self._core.prepare_step(
            [sequence._core for sequence in sequences], list(num_tokens), buffers._core, padded_sequences, padded_tokens
        )
        for sequence in sequences:
            sequence._clear()
        return stamps

    def pin_prefix(self, tokens: TokenInput, namespace: _core.Namespace | None = None) -> _core.PinnedPrefix:
        """Keeps the longest recoverable prefix of ``tokens`` until the handle's ``release()``; also a context manager.

        The handle tells ``num_tokens`` and ``bytes``. AdmissionError of kind "pin_prefix" over the cap for pinned prefixes.
        """
        return self._core.pin_prefix(as_token_ids(tokens), self._space(namespace))

    def bytes_for(self, num_tokens: int, chunk_tokens: int | None = None, *, live_state: bool = False) -> int:
        """Bytes that a request of ``num_tokens`` tokens holds at its peak, without any hit: what ``admit`` asks for."""
        return self._core.bytes_for(num_tokens, chunk_tokens or 0, live_state)

    # --- rows ---

    def read_rows(self, group: str | int, field: str, slots: SlotInput, out: Tensor | None = None) -> Tensor:
        """Copies rows of all layers of a group out of the arena: [layers, n, *field shape], of the field's dtype.

        slots: int64 [n], as from ``Sequence.slot_mapping``; numpy, torch or a list. out: written and returned instead of a new
        tensor. ArgumentError for a wrong shape, dtype or device; on the CPU ValueError for a slot outside the arena.
        """
        return self._rows.read(group, field, slots, out)

    def write_rows(self, group: str | int, field: str, slots: SlotInput, rows: Tensor) -> None:
        """Copies rows [layers, n, *field shape], of the field's dtype, into the arena. The inverse of ``read_rows``."""
        self._rows.write(group, field, slots, rows)

    def read_block(self, group: str | int, field: str, offset: int, rows: int | None = None) -> Tensor:
        """The first ``rows`` rows (default: all that a block has) of one block: [layers, rows, *field shape].

        offset: as from ``Sequence.point_block`` or a block table, in units of 256 bytes.
        """
        return self._rows.read_block(group, field, offset, rows)

    def write_block(self, group: str | int, field: str, offset: int, rows: Tensor) -> None:
        """Writes the first rows of one block from [layers, rows, *field shape]. The inverse of ``read_block``."""
        self._rows.write_block(group, field, offset, rows)

    def scratch_block(self, group: str | int) -> int:
        """Offset of the group's scratch block, to which padding points. Its content means nothing."""
        return self._core.scratch(self.group_id(group))

    # --- memory ---

    def evict(self, kind: str | _core.ObjectKind, blocks: int = 1) -> int:
        """Evicts up to ``blocks`` of the coldest objects of a kind that nobody uses; returns how many went.

        History groups leave together, one block of a prefix at a time. RouteError if the kind cannot be evicted.
        """
        if blocks < 0:
            raise ArgumentError("blocks", str(blocks), "0 or more")
        return self._core.evict(_kind_name(kind), blocks)

    def evict_object(self, tokens: TokenInput, position: int, group: str | int, namespace: _core.Namespace | None = None) -> bool:
        """Evicts one object of the prefix ``tokens[:position]``: a point group's, or the history there if nothing depends on it.

        False if it is absent or in use. ArgumentError unless ``position`` is a multiple of block_size in (0, len(tokens)].
        """
        return self._core.evict_object(as_token_ids(tokens), self._space(namespace), position, self.group_id(group))

    def quarantine(
        self,
        tokens: TokenInput,
        position: int,
        group: str | int,
        reason: LossReason | str = LossReason.CHECKSUM,
        namespace: _core.Namespace | None = None,
    ) -> int:
        """Takes an object whose bytes are bad, and what depends on it, out of sight, used or not. Returns how many were marked.

        ``reason`` is what later reports name for a history group; a window, tail or snapshot reads as evicted. ``Sequence.ok`` of
        its users turns False.
        """
        return self._core.quarantine(as_token_ids(tokens), self._space(namespace), position, self.group_id(group), str(reason))

    def flush(self) -> None:
        """Waits until what was published is copied to the tiers below, whatever their write policy defers."""
        self._core.flush()

    def stats(self) -> dict[str, Any]:
        """Counters since the start and sizes now, by name; a snapshot that takes no lock.

        kinds: kind to used_bytes, cap_bytes (None: no cap), floor_bytes. pools: pool to its blocks and slabs. Hits, of
        admissions: prompt_tokens, hash_hit_tokens, recoverable_tokens, and losses by reason, in tokens. evictions by kind, in
        objects; tiers: what the tiers below hold, stored, loaded and met of faults; restores; refusals by cause;
        published_nodes, published_points by group; bytes of metadata and stranded in half-used slabs.
        """
        stats = self._core.stats()
        slab = stats["slab_bytes"]
        stats["kinds"] = {
            kind: {"used_bytes": used, "cap_bytes": self._caps.get(kind), "floor_bytes": self._floors.get(kind, 0) * slab}
            for kind, used in stats.pop("used_bytes").items()
        }
        return stats

    def check_invariants(self) -> None:
        """For tests, while no other thread uses the cache: ends the process, naming the rule, if an invariant is broken."""
        self._core.check_invariants()

    # --- inside ---

    def _space(self, namespace: _core.Namespace | None) -> _core.Namespace:
        return self._default if namespace is None else namespace

    def __repr__(self) -> str:
        return f"<hetkv.Cache of {self._arena.numel()} bytes on {self.device} for {self._layout.model!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("a hetkv.Cache cannot be pickled: it owns memory")


def _kind_name(kind: str | _core.ObjectKind) -> str:
    return kind.name if isinstance(kind, _core.ObjectKind) else kind


def _allocate(size: int, device: torch.device) -> Tensor:
    """Zeroed uint8 [size], its address a multiple of 256. Zeros, since padding reads scratch blocks, and 0 x NaN is NaN."""
    if device.type == "cpu":
        raw = torch.from_numpy(np.zeros(size + _ALIGNMENT, dtype=np.uint8))  # pages are supplied when first used
    else:
        raw = torch.zeros(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    return raw.narrow(0, -raw.data_ptr() % _ALIGNMENT, size)
