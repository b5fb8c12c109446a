"""The disk tier beside plain sequential reads and writes of the same bytes, and the opening of large folders.

    python bench/bench_disk.py [--folder DIR] [--tokens 32768] [--rounds 5] [--open 100000 1000000] [--json FILE]

The prefix has the layout of DeepSeek-V4-Flash (43 layers, bfloat16), one turn of --tokens tokens with random bytes. A round
stores it through `Cache.flush`, writes one plain file of as many bytes, restores it through `Cache.admit` into a fresh cache,
and reads the plain file; both sides go past the page cache. Reported are medians over the rounds and their ratio. Folders to
open hold files with right names and no bytes, since opening reads names only.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from provenance import provenance

import hetkv

BLOCK = 128
CHUNK = 8 << 20
GIB = 2**30


def flash_layout() -> hetkv.CacheLayout:
    """DeepSeek-V4-Flash: two layers with a window only, then compression by 4 and by 128 in turns."""
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    layers = ["sliding_attention"] * 2 + [kinds[i % 2] for i in range(41)]
    config = transformers.DeepseekV4Config(layer_types=layers)
    return hetkv.CacheLayout.from_config(config, block_size=BLOCK, dtype="bfloat16")


def plain_write(path: Path, size: int) -> float:
    """Seconds to write a file of `size` bytes, past the page cache."""
    buffer = mmap.mmap(-1, CHUNK)  # page-aligned
    buffer.write(os.urandom(CHUNK))
    started = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    for _ in range(size // CHUNK):
        os.write(file, buffer)
    os.close(file)
    return time.perf_counter() - started


def plain_read(path: Path) -> float:
    """Seconds to read the file, past the page cache."""
    buffer = mmap.mmap(-1, CHUNK)
    started = time.perf_counter()
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    while os.readv(file, [buffer]) > 0:
        pass
    os.close(file)
    return time.perf_counter() - started


def publish(cache: hetkv.Cache, tokens: np.ndarray) -> None:
    """One turn whose rows are whatever the arena holds."""
    with cache.admit(tokens) as sequence:
        while sequence.scheduled < len(tokens):
            end = min(len(tokens), sequence.scheduled + BLOCK)
            stamp = sequence.schedule(end)
            staged = sequence.stage_point(end) if sequence.wants_point(end) else {}
            sequence.commit_point(end, dict.fromkeys(staged, end))
            sequence.settle(stamp)
            sequence.publish()


def one_round(folder: Path, tokens: np.ndarray, capacity: int) -> dict[str, float]:
    """Seconds and bytes of each side."""
    store = folder / "store"
    shutil.rmtree(store, ignore_errors=True)
    layout = flash_layout()
    cache = hetkv.Cache(layout, capacity, disk=hetkv.DiskTier(store, write="evict"))
    torch.randint(0, 256, cache.arena.shape, dtype=torch.uint8, out=cache.arena)
    publish(cache, tokens)
    started = time.perf_counter()
    cache.flush()
    store_seconds = time.perf_counter() - started
    size = cache.stats()["tiers"]["disk"]["written_bytes"]
    del cache

    plain = folder / "plain"
    write_seconds = plain_write(plain, size)
    plain_bytes = plain.stat().st_size
    cache = hetkv.Cache(layout, capacity, disk=store)
    cache.arena.fill_(1)  # the pages are there before the clock runs, as in an engine
    started = time.perf_counter()
    sequence = cache.admit(tokens)
    restore_seconds = time.perf_counter() - started
    assert sequence.num_computed_tokens == (len(tokens) - 1) // BLOCK * BLOCK, sequence.report
    loaded = cache.stats()["tiers"]["disk"]["read_bytes"]
    sequence.free(turn_end=False)
    read_seconds = plain_read(plain)
    plain.unlink()
    return {
        "store": size / store_seconds,
        "plain write": plain_bytes / write_seconds,
        "restore": loaded / restore_seconds,
        "plain read": plain_bytes / read_seconds,
        "bytes stored": size,
        "bytes restored": loaded,
        "restore seconds": restore_seconds,
    }


def opening(folder: Path, bundles: int) -> dict[str, float]:
    """Seconds to open a folder of so many bundles."""
    store = folder / "many"
    shutil.rmtree(store, ignore_errors=True)
    layout = flash_layout()
    hetkv.Cache(layout, "1GiB", disk=store)
    rng = np.random.default_rng(0)
    for n in range(bundles):
        key = rng.bytes(16).hex()
        (store / key[:2] / f"{key}{'0' * 32}-h-{n % 256 + 1:x}-d8000").touch(mode=0o600)
    started = time.perf_counter()
    cache = hetkv.Cache(layout, "1GiB", disk=store)
    seconds = time.perf_counter() - started
    found = cache.stats()["tiers"]["disk"]["bundles"]
    assert found == bundles, found
    del cache
    shutil.rmtree(store)
    return {"bundles": bundles, "seconds": seconds}


def main() -> None:
    """Runs it and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the file system to measure (default: a temporary one)")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--open", type=int, nargs="*", default=[100_000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 100000, options.tokens + 1, dtype=np.int32)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        rounds = [one_round(folder, tokens, GIB * max(1, options.tokens // 32768)) for _ in range(options.rounds)]
        opened = [opening(folder, bundles) for bundles in options.open]
    median = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    for side, plain in (("store", "plain write"), ("restore", "plain read")):
        ratio = statistics.median(r[side] / r[plain] for r in rounds)
        median[f"{side} ratio"] = ratio
        print(f"{side:8} {median[side] / GIB:6.2f} GiB/s   {plain:11} {median[plain] / GIB:6.2f} GiB/s   ratio {ratio:.2f}")
    print(f"restored {median['bytes restored'] / GIB:.3f} GiB in {median['restore seconds']:.3f} s")
    for result in opened:
        print(f"opening {result['bundles']:>8} bundles: {result['seconds']:.2f} s")
    if options.json is not None:
        document = {**provenance(), "tokens": options.tokens, "rounds": rounds, "median": median, "opening": opened}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
