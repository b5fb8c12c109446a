"""Namespaces, versions, eviction, pinned prefixes, counters and options of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import hetkv
from hetkv.byte_size import byte_size

Tokens = npt.NDArray[np.int32]
Serve = Callable[..., hetkv.Sequence]

# A call that does not come back runs in C++ without the GIL, where a signal cannot end it.
pytestmark = pytest.mark.timeout(60, method="thread")


# --- identity ----------------------------------------------------------------------------------------------------------------


def test_namespaces_do_not_share(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    salt, adapter = cache.namespace(salt="x"), cache.namespace(adapter="x")
    assert salt == cache.namespace(salt="x") != adapter
    assert len({salt, adapter, cache.namespace(salt="x")}) == 2
    assert cache.namespace() == cache.namespace(salt="", adapter="", digests=["", b""])
    assert cache.namespace(digests=["a", "b"]) != cache.namespace(digests=["b", "a"]) != cache.namespace(digests=["ab"])
    assert cache.namespace(adapter="a", digests=[b"\x00\xff"]).fields == (("adapter", b"a"), ("digest:0", b"\x00\xff"))
    serve(cache, prompt, namespace=salt).free()
    assert cache.probe(prompt, salt).num_recoverable_tokens == 96
    assert cache.probe(prompt, adapter).num_hash_hit_tokens == 0
    assert cache.probe(prompt).num_hash_hit_tokens == 0
    assert salt.used_bytes > 0 == adapter.used_bytes
    assert cache.clear(salt) == 6
    assert cache.probe(prompt, salt).num_hash_hit_tokens == 0
    assert salt.used_bytes == 0


def test_a_namespace_of_another_cache_is_refused(cache: hetkv.Cache, hybrid_layout: hetkv.CacheLayout, prompt: Tokens) -> None:
    foreign = hetkv.Cache(hybrid_layout, "1MiB").namespace(salt="x")
    calls: list[Callable[[], object]] = [
        lambda: cache.probe(prompt, foreign),
        lambda: cache.admit(prompt, foreign),
        lambda: cache.pin_prefix(prompt, foreign),
        lambda: cache.clear(foreign),
        lambda: cache.set_quota(foreign, 1000),
        lambda: cache.evict_object(prompt, 16, "full", foreign),
        lambda: cache.quarantine(prompt, 16, "full", "checksum", foreign),
    ]
    for call in calls:
        with pytest.raises(hetkv.ArgumentError) as caught:
            call()
        assert caught.value.argument == "namespace"


def test_versions_change_the_reason(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    serve(cache, prompt).free()
    assert cache.model_version == "0"
    cache.set_model_version("w1")
    assert cache.probe(prompt).lost("model_version") == 96
    cache.set_model_version("0")
    assert cache.probe(prompt).num_recoverable_tokens == 96
    cache.set_abi("window_attention", 2)
    assert cache.abi == {"window_attention": 2}
    assert cache.probe(prompt).lost(hetkv.LossReason.ABI) == 96
    serve(cache, prompt).free()
    cache.declare_alignment("window_attention", 64)
    assert cache.probe(prompt).lost("layout") == 96


# --- memory ------------------------------------------------------------------------------------------------------------------


def test_evict_and_quarantine(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    serve(cache, prompt).free()
    assert not cache.evict_object(prompt, 16, "full")  # its children depend on it
    assert cache.evict_object(prompt, 96, "state")
    assert cache.probe(prompt).losses[1:] == (hetkv.Loss(hetkv.LossReason.SNAPSHOT_EVICTED, "state", 16),)
    assert cache.evict("recurrent_state", 3) == 3
    assert cache.evict(hetkv.ObjectKind.recurrent_state, 10) == 2
    assert cache.evict("full_kv") == 1
    assert cache.probe(prompt).num_history_tokens == 80
    with cache.admit(prompt) as seq:
        assert seq.ok
        assert cache.quarantine(prompt, 32, "comp", hetkv.LossReason.CHECKSUM) >= 4
        report = cache.probe(prompt)
        assert report.num_history_tokens == 16
        assert hetkv.Loss(hetkv.LossReason.CHECKSUM, "comp", 64) in report.losses
    for call in (
        lambda: cache.evict("nothing"),
        lambda: cache.evict("full_kv", -1),
        lambda: cache.evict_object(prompt, 17, "full"),
        lambda: cache.evict_object(prompt, 16, "nothing"),
        lambda: cache.quarantine(prompt, 16, "full", "bad luck"),
    ):
        with pytest.raises(hetkv.ArgumentError):
            call()


def test_ok_turns_false_under_a_quarantine(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    serve(cache, prompt).free()
    with cache.admit(prompt) as seq:
        assert seq.num_computed_tokens == 96
        assert seq.ok
        cache.quarantine(prompt, 96, "full")
        assert not seq.ok


def test_pinned_prefixes_stay(hybrid_layout: hetkv.CacheLayout, prompt: Tokens, serve: Serve) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", retention="all", pin_prefix_cap="20KiB")
    serve(cache, prompt).free()
    with cache.pin_prefix(prompt[:96]) as pinned:
        assert pinned.num_tokens == 96
        assert 0 < pinned.bytes <= 20 * 1024
        with pytest.raises(hetkv.AdmissionError) as caught:
            cache.pin_prefix(prompt)
        assert (caught.value.kind, caught.value.cap) == ("pin_prefix", 20 * 1024)
        assert cache.evict("full_kv", 10) == 0
    pinned.release()
    assert cache.evict("full_kv", 10) == 6


def test_stats_count_hits_and_recoverable_tokens_apart(hybrid_layout: hetkv.CacheLayout, prompt: Tokens, serve: Serve) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", retention="all", floors={"swa_window": 2}, caps={"full_kv": "512KiB"})
    idle = cache.stats()["kinds"]["full_kv"]["used_bytes"]  # the scratch block
    serve(cache, prompt).free()
    cache.evict_object(prompt, 96, "win")
    cache.admit(prompt).free(turn_end=False)
    stats = cache.stats()
    assert (stats["prompt_tokens"], stats["hash_hit_tokens"], stats["recoverable_tokens"]) == (200, 96, 80)
    assert {reason: n for reason, n in stats["losses"].items() if n} == {"granularity": 8, "not_found": 96, "window_evicted": 16}
    assert stats["evictions"] == {
        "full_kv": 0, "compressed_kv": 0, "swa_window": 1, "uncompressed_tail": 0, "recurrent_state": 0,
    }  # fmt: skip
    assert stats["kinds"]["full_kv"] == {"used_bytes": idle + 6 * 2048, "cap_bytes": 512 * 1024, "floor_bytes": 0}
    assert stats["kinds"]["swa_window"]["floor_bytes"] == 2 * stats["slab_bytes"]
    assert stats["pools"]["full"]["block_bytes"] == 2048
    assert stats["published_nodes"] == stats["live_nodes"] == 6
    assert stats["published_points"] == {"win": 6, "tail": 6, "state": 6}
    assert stats["arena_bytes"] == cache.arena.numel()
    assert stats["metadata_bytes"] > 0 <= stats["stranded_bytes"]
    assert stats["admissions"] == 2


def test_bytes_for_is_what_admission_takes(cache: hetkv.Cache) -> None:
    before = sum(kind["used_bytes"] for kind in cache.stats()["kinds"].values())
    with cache.admit(np.zeros(100, np.int32), chunk_tokens=32):
        used = sum(kind["used_bytes"] for kind in cache.stats()["kinds"].values())
        assert used - before == cache.bytes_for(100, 32)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("capacity", {"capacity": "many"}),
        ("capacity", {"capacity": 0}),
        ("capacity", {"capacity": 1.5}),
        ("verify_tokens", {"verify_tokens": "some"}),
        ("secret", {"secret": 0}),
        ("secret", {"secret": 2**64}),
        ("retention", {"retention": "every(0)"}),
        ("kind", {"caps": {"nothing": 5}}),
        ("kind", {"floors": {"nothing": 5}}),
        ("floors['full_kv']", {"floors": {"full_kv": -1}}),
        ("caps['full_kv']", {"caps": {"full_kv": "5 apples"}}),
        ("max_nodes", {"max_nodes": -1}),
        ("slab_bytes", {"slab_bytes": 100}),
    ],
)
def test_bad_options_are_refused_by_name(argument: str, options: dict[str, Any], hybrid_layout: hetkv.CacheLayout) -> None:
    with pytest.raises(hetkv.ArgumentError) as caught:
        hetkv.Cache(hybrid_layout, **({"capacity": "1MiB"} | options))
    assert caught.value.argument == argument


def test_an_arena_that_is_too_small_is_refused(hybrid_layout: hetkv.CacheLayout) -> None:
    with pytest.raises(hetkv.HetkvError):
        hetkv.Cache(hybrid_layout, 4096)
    with pytest.raises(hetkv.AdmissionError) as caught:
        hetkv.Cache(hybrid_layout, "64KiB", slab_bytes="4KiB", floors={"full_kv": 17})
    assert not caught.value.retryable


@pytest.mark.parametrize("options", [{"lock_free": False}, {"verify_tokens": "deepest"}, {"max_nodes": 100}, {"secret": None}])
def test_options_keep_the_promises(
    options: dict[str, Any], hybrid_layout: hetkv.CacheLayout, prompt: Tokens, serve: Serve
) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", retention="all", **options)
    serve(cache, prompt).free()
    assert cache.probe(prompt).num_recoverable_tokens == 96


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("5B", 5),
        ("1KiB", 1024),
        ("1.5 MiB", 1572864),
        ("2GB", 2 * 10**9),
        (" 1 TiB ", 2**40),
        ("3kB", None),
        ("-1B", None),
    ],
)
def test_sizes(text: int | str, size: int | None) -> None:
    if size is not None:
        assert byte_size(text, "size") == size
    else:
        with pytest.raises(hetkv.ArgumentError, match="size"):
            byte_size(text, "size")
