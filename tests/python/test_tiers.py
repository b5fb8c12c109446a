"""Tiers below the device, from Python: real files, real arenas, and what an engine sees of a restore."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import hetkv

BLOCK = 16


def small_layout() -> hetkv.CacheLayout:
    def group(name: str, kind: hetkv.ObjectKind, retention: hetkv.Retention, window: int = 0) -> hetkv.GroupSpec:
        return hetkv.GroupSpec(
            name=name,
            kind=kind,
            retention=retention,
            window=window,
            owner_layers=[0, 1],
            fields=[hetkv.FieldSpec("kv", hetkv.DType.float32, [8])],
        )

    return hetkv.CacheLayout.build(
        "small",
        BLOCK,
        [
            group("full", hetkv.ObjectKind.full_kv, hetkv.Retention.history),
            group("swa", hetkv.ObjectKind.swa_window, hetkv.Retention.window, 20),
        ],
    )


def tokens_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30000, n, dtype=np.int32)


def rows_for(tokens: np.ndarray, begin: int, end: int, salt: int) -> torch.Tensor:
    """What the rows of tokens [begin, end) hold: [2 layers, n, 8], a function of the prefix."""
    prefix = torch.from_numpy(np.cumsum(tokens.astype(np.float64))[begin:end] + salt).float()
    return torch.stack([prefix[:, None] + torch.arange(8) + 100 * layer for layer in range(2)])


def run(sequence: hetkv.Sequence, cache: hetkv.Cache, tokens: np.ndarray) -> None:
    begin = sequence.scheduled
    while begin < len(tokens):
        end = min(len(tokens), (begin // BLOCK + 1) * BLOCK)
        stamp = sequence.schedule(end)
        for salt, name in enumerate(cache.group_names):
            cache.write_rows(name, "kv", sequence.slot_mapping(name, begin, end), rows_for(tokens, begin, end, salt))
        sequence.settle(stamp)
        sequence.publish()
        begin = end


def turn(cache: hetkv.Cache, tokens: np.ndarray) -> hetkv.HitReport:
    with cache.admit(tokens) as sequence:
        check(sequence, cache, tokens)
        run(sequence, cache, tokens)
        return sequence.report


def check(sequence: hetkv.Sequence, cache: hetkv.Cache, tokens: np.ndarray) -> None:
    p = sequence.num_computed_tokens
    for salt, name in enumerate(cache.group_names):
        need = cache.layout.need(name, p)
        got = cache.read_rows(name, "kv", sequence.slot_mapping(name, need.begin, need.end))
        assert torch.equal(got, rows_for(tokens, need.begin, need.end, salt))


def empty(cache: hetkv.Cache) -> None:
    for kind in ("swa_window", "full_kv"):
        cache.evict(kind, 10**6)


def new_cache(**tiers: object) -> hetkv.Cache:
    return hetkv.Cache(small_layout(), "1MiB", retention="all", **tiers)  # type: ignore[arg-type]


def test_a_second_process_finds_what_the_first_stored(tmp_path: Path) -> None:
    tokens = tokens_of(1, 200)
    program = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        from test_tiers import new_cache, tokens_of, turn
        report = turn(new_cache(disk=sys.argv[2]), tokens_of(1, 200))
        print(report.num_restored_tokens)
        """
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path / "store")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "192\n"
    report = turn(new_cache(disk=tmp_path / "store"), tokens)
    assert report.num_restored_tokens == report.num_recoverable_tokens == 192
    assert report.restore_bytes > 0
    assert "192 of them from lower tiers" in str(report)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_host_above_disk(tmp_path: Path, compression: str | None) -> None:
    try:
        disk = hetkv.DiskTier(tmp_path / "store", capacity="64MiB", compression=compression)  # type: ignore[arg-type]
        cache = new_cache(host=hetkv.HostTier("256KiB"), disk=disk)
    except hetkv.ArgumentError as error:
        assert compression == "zstd"
        assert "built without libzstd" in str(error)  # noqa: PT017
        return
    prompts = [tokens_of(seed, 300) for seed in range(20)]
    for prompt in prompts:
        turn(cache, prompt)
    cache.flush()
    tiers = cache.stats()["tiers"]
    assert tiers["host"]["spills"]["stored"] > 0
    assert tiers["disk"]["bundles"] == tiers["disk"]["writes"]["done"] > 0
    empty(cache)
    for prompt in prompts:
        assert turn(cache, prompt).num_recoverable_tokens == 288
    assert cache.stats()["restores"]["bytes"] > 0
    cache.check_invariants()


def test_an_admission_can_be_polled_called_back_and_awaited(tmp_path: Path) -> None:
    cache = new_cache(disk=tmp_path / "store")
    tokens = tokens_of(1, 200)
    turn(cache, tokens)
    cache.flush()

    empty(cache)
    called = threading.Event()
    sequence = cache.admit(tokens, restore="async")
    sequence.when_ready(called.set)
    assert called.wait(10)
    assert sequence.ready
    assert sequence.num_computed_tokens == 192
    check(sequence, cache, tokens)
    sequence.free(turn_end=False)

    empty(cache)

    async def resume() -> int:
        sequences = [await cache.admit(tokens, restore="async") for _ in range(3)]
        points = [sequence.num_computed_tokens for sequence in sequences]
        for sequence in sequences:
            check(sequence, cache, tokens)
            sequence.free(turn_end=False)
        assert len(set(points)) == 1
        return points[0]

    assert asyncio.run(resume()) == 192
    empty(cache)
    assert cache.admit(tokens, restore="none").num_computed_tokens == 0


def test_a_pending_sequence_refuses_use_and_can_be_freed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    cache = new_cache(disk=hetkv.DiskTier(store, load_threads=1))
    tokens = tokens_of(1, 600)
    turn(cache, tokens)
    cache.flush()
    refused = 0
    for _ in range(200):  # a restore may be over before we look
        empty(cache)
        sequence = cache.admit(tokens, restore="async")
        try:
            _ = sequence.num_computed_tokens
        except hetkv.PendingError:
            refused += 1
            with pytest.raises(hetkv.PendingError, match="waits for a restore"):
                sequence.schedule(sequence.num_tokens)
        sequence.free(turn_end=False)
        sequence.free()
        if refused >= 3:
            break
    assert refused >= 3
    report = turn(cache, tokens)
    assert report.num_recoverable_tokens == 592
    cache.check_invariants()


def files(store: Path, part: str) -> list[Path]:
    return sorted(path for path in store.rglob(f"*-{part}-*") if path.is_file())


def test_files_are_private_and_their_names_say_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    old = os.umask(0)
    try:
        cache = new_cache(disk=store)
        turn(cache, tokens_of(1, 200))
        cache.flush()
    finally:
        os.umask(old)
    assert len(files(store, "h")) == 12
    for path in store.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode & 0o077 == 0, path
    other = new_cache(disk=tmp_path / "other")
    turn(other, tokens_of(1, 200))
    other.flush()
    names = {path.name[:32] for path in files(store, "h")}
    assert names.isdisjoint(path.name[:32] for path in files(tmp_path / "other", "h")), "a name depends on the folder's secret"


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)


def damage_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def damage_foreign(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


def damage_newer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)


def damage_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def damage_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damage_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def damage_gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "outcome"),
    [
        (damage_truncate, "truncated"),
        (damage_flip, "checksum"),
        (damage_header, "header"),
        (damage_foreign, "foreign"),
        (damage_newer, "header"),  # the checksum covers the format number
        (damage_link, "not_regular"),
        (damage_folder, "not_regular"),
        (damage_pipe, "not_regular"),
        (damage_gone, "missing"),
    ],
)
def test_a_damaged_bundle_is_a_counted_miss(tmp_path: Path, damage: Callable[[Path], None], outcome: str) -> None:
    store = tmp_path / "store"
    tokens = tokens_of(1, 200)
    cache = new_cache(disk=store)
    turn(cache, tokens)
    cache.flush()
    del cache
    gc.collect()
    fifth = next(path for path in files(store, "h") if "-h-5-" in path.name)
    damage(fifth)
    cache = new_cache(disk=store)
    report = turn(cache, tokens)
    assert report.num_recoverable_tokens == 64
    reads = cache.stats()["tiers"]["disk"]["reads"]
    assert reads[outcome] == 1, reads
    # What was computed instead is right, and is found again.
    assert turn(cache, tokens).num_recoverable_tokens == 192


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (lambda root: root / "file", "a folder, not a link or a file"),
        (lambda root: root / "link", "a folder, not a link or a file"),
        (lambda root: root / "none" / "deeper", "a folder that can be made: No such file"),
        (lambda root: root / "open", "a folder that only its owner may write"),
    ],
)
def test_a_folder_that_will_not_do_is_refused_by_name(tmp_path: Path, path: Callable[[Path], Path], expected: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(hetkv.ArgumentError, match=expected) as caught:
        new_cache(disk=path(tmp_path))
    assert caught.value.argument == "path"
    assert str(path(tmp_path)) in caught.value.value


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_someone_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    os.chown(tmp_path / "store", 12345, 12345)
    with pytest.raises(hetkv.ArgumentError, match="a folder of this user"):
        new_cache(disk=tmp_path / "store")


@pytest.mark.parametrize(
    ("tier", "argument"),
    [
        ({"disk": {"write": "sometimes"}}, "write"),
        ({"disk": {"retention": "every(0)"}}, "retention"),
        ({"disk": {"fsync": "yes"}}, "fsync"),
        ({"disk": {"compression": "gzip"}}, "compression"),
        ({"disk": {"capacity": 100}}, "capacity"),
        ({"disk": {"load_threads": 0}}, "disk.load_threads"),
        ({"host": {"capacity": "none"}}, "host.capacity"),
        ({"host": {"capacity": "1MiB", "retention": "often"}}, "retention"),
        ({"host": {"capacity": "1MiB", "caps": {"swa": 1}}}, "kind"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, tier: dict[str, dict[str, object]], argument: str) -> None:
    disk = hetkv.DiskTier(tmp_path / "store", **tier["disk"]) if "disk" in tier else None  # type: ignore[arg-type]
    host = hetkv.HostTier(**tier["host"]) if "host" in tier else None  # type: ignore[arg-type]
    with pytest.raises(hetkv.ArgumentError) as caught:
        new_cache(disk=disk, host=host)
    assert caught.value.argument == argument


def test_a_secret_of_ones_own_does_not_go_with_a_folder(tmp_path: Path) -> None:
    with pytest.raises(hetkv.ArgumentError, match="the folder has its own"):
        new_cache(disk=tmp_path / "store", secret=7)


@pytest.mark.parametrize(("retention", "kept"), [("all", 12), ("every(4)", 6), ("turn_ends", 0), ("none", 0)])
def test_which_checkpoints_go_to_disk(tmp_path: Path, retention: str, kept: int) -> None:
    store = tmp_path / "store"
    cache = new_cache(disk=hetkv.DiskTier(store, retention=retention))
    tokens = tokens_of(1, 200)
    turn(cache, tokens)
    cache.flush()
    # A window of 20 tokens needs the two blocks before its position.
    windows = len(files(store, "p0"))
    assert windows == kept if retention != "turn_ends" else 0 < windows < 12
    empty(cache)
    expected = {"all": 192, "every(4)": 192, "turn_ends": 192, "none": 0}[retention]
    assert turn(cache, tokens).num_recoverable_tokens == expected


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Each publishes, restores, and evicts what the other needs: nothing wrong is ever read, nothing raises."""
    program = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        import hetkv, numpy as np
        from test_tiers import new_cache, tokens_of, turn, empty
        cache = new_cache(disk=hetkv.DiskTier(sys.argv[2], capacity="400KiB"))
        rng = np.random.default_rng(int(sys.argv[3]))
        restored = 0
        for _ in range(150):
            restored += turn(cache, tokens_of(int(rng.integers(12)), int(rng.integers(20, 300)))).num_restored_tokens
            if rng.random() < 0.3:
                cache.flush()
                empty(cache)
        print(restored)
        """
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path / "store")]
    both = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in (1, 2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(int(output) > 0 for output in outputs)
    assert not list((tmp_path / "store").glob("tmp-*")), "both closed their folders for temporary files"


def test_the_cache_may_go_before_what_was_made_from_it(tmp_path: Path) -> None:
    cache = new_cache(host="1MiB", disk=tmp_path / "store")
    namespace = cache.namespace(salt="x")
    turn(cache, tokens_of(1, 200))
    del cache
    gc.collect()
    assert namespace.fields == (("salt", b"x"),)
    del namespace
    gc.collect()
    assert len(files(tmp_path / "store", "h")) == 12, "what was published is stored before the threads end"
