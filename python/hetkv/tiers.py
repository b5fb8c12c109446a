"""What lies below the device: host memory and a folder on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .byte_size import byte_size
from .errors import ArgumentError

__all__ = ["DiskTier", "HostTier"]

Write = Literal["through", "evict", "none"]


@dataclass(frozen=True)
class HostTier:
    """A second arena, in host memory, that keeps copies of what the device may have to evict.

    capacity: bytes, or text such as "4GiB". write: "through" copies what is published at once; "evict" once the device is three
    quarters full; "none" never. retention: which checkpoints go down: "all", "every(N)" (at multiples of N blocks), "turn_ends"
    or "none"; history always does. floors, caps, slab_bytes, max_nodes: as for `Cache`, of this arena.
    """

    capacity: int | str
    write: Write = "through"
    retention: str = "all"
    floors: Mapping[str, int] = field(default_factory=dict)
    caps: Mapping[str, int | str] = field(default_factory=dict)
    slab_bytes: int | str = 0
    max_nodes: int = 0

    @property
    def num_bytes(self) -> int:
        """`capacity` as a number."""
        return byte_size(self.capacity, "host.capacity")

    def to_core(self, base_address: int) -> dict[str, Any]:
        """As the core takes it; `base_address`: of its memory."""
        return {
            "bytes": self.num_bytes,
            "base_address": base_address,
            "slab_bytes": 0 if self.slab_bytes == 0 else byte_size(self.slab_bytes, "host.slab_bytes"),
            "max_nodes": self.max_nodes,
            "floors": dict(self.floors),
            "caps": {kind: byte_size(cap, f"host.caps[{kind!r}]") for kind, cap in self.caps.items()},
            "write": self.write,
            "retention": self.retention,
        }


@dataclass(frozen=True)
class DiskTier:
    """A folder of bundles, one file per block and group set, that outlives the process. Format: docs/bundle-format.md.

    path: made if it is not there, private to the user; several processes may share it. capacity: the most that its files may
    hold; None: no limit. write, retention: as for `HostTier`; with a host tier the disk takes from there. fsync: "none"
    survives the end of the process at any point, and what lost power tore is noticed when it is read; "data": a bundle that has
    its name has its bytes; "full": what was stored stays stored. compression: None or "zstd". direct: read and write past the
    page cache where the file system can. load_threads, store_threads: of their own, so that a slow store never keeps a load
    waiting.

    Every byte is verified before it counts. A fault of the disk is a miss with its reason (`Cache.stats()["tiers"]["disk"]`),
    never an exception of a request. The prefix hash of a cache with a disk tier takes its secret from the folder.
    """

    path: str | os.PathLike[str]
    capacity: int | str | None = None
    write: Write = "through"
    retention: str = "all"
    fsync: Literal["none", "data", "full"] = "none"
    compression: Literal["zstd"] | None = None
    direct: bool = True
    load_threads: int = 4
    store_threads: int = 4

    def to_core(self) -> dict[str, Any]:
        """As the core takes it."""
        for name in ("load_threads", "store_threads"):
            if not 1 <= getattr(self, name) <= 256:
                raise ArgumentError(f"disk.{name}", str(getattr(self, name)), "1 to 256")
        return {
            "path": os.fspath(self.path),
            "capacity": 2**64 - 1 if self.capacity is None else byte_size(self.capacity, "disk.capacity"),
            "write": self.write,
            "retention": self.retention,
            "fsync": self.fsync,
            "compression": self.compression,
            "direct": self.direct,
            "load_threads": self.load_threads,
            "store_threads": self.store_threads,
        }
