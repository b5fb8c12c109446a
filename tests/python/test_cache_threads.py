"""Threads: the GIL is free while the core scans, and a sequence used from two threads says so."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import hetkv

Tokens = npt.NDArray[np.int32]
Serve = Callable[..., hetkv.Sequence]

# A call that does not come back runs in C++ without the GIL, where a signal cannot end it.
pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.fixture
def long_prompt(plain_layout: hetkv.CacheLayout) -> tuple[hetkv.Cache, Tokens]:
    return hetkv.Cache(plain_layout, "16MiB"), np.zeros(4_000_000, np.int32)


def test_two_threads_in_one_sequence_get_an_error(long_prompt: tuple[hetkv.Cache, Tokens]) -> None:
    cache, tokens = long_prompt
    seq = cache.admit(tokens[:1000])
    seq.append(tokens)
    stop, refused = threading.Event(), []

    def hash_again() -> None:
        while not stop.is_set():
            try:
                seq.hashed_prefix()  # some milliseconds without the GIL
            except RuntimeError as error:
                refused.append(str(error))

    worker = threading.Thread(target=hash_again)
    worker.start()
    deadline = time.monotonic() + 15
    try:
        while not refused and time.monotonic() < deadline:
            try:
                assert seq.num_tokens == 4_001_000
            except RuntimeError as error:
                refused.append(str(error))
    finally:
        stop.set()
        worker.join()
    assert refused[0] == "sequence used from two threads at once"
    assert seq.num_tokens == 4_001_000  # and it is not left busy
    seq.free()


def test_the_gil_is_free_while_a_long_prompt_is_probed(long_prompt: tuple[hetkv.Cache, Tokens]) -> None:
    cache, tokens = long_prompt
    inside = done = False

    def probe() -> None:
        nonlocal inside, done
        for _ in range(20):
            inside = True
            cache.probe(tokens)
            inside = False
        done = True

    worker = threading.Thread(target=probe)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)  # this thread runs only when the other gives the GIL up by itself
    turns = 0
    try:
        worker.start()
        while not done:
            turns += inside
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
        worker.join()
    assert turns > 10  # 0 or 1 if the GIL is kept


def test_many_threads_on_their_own_sequences(hybrid_layout: hetkv.CacheLayout, serve: Serve) -> None:
    cache = hetkv.Cache(hybrid_layout, "2MiB", retention="all")
    shared = np.arange(64, dtype=np.int32)
    failures: list[BaseException] = []

    def requests(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                tokens = np.concatenate([shared, rng.integers(0, 5, 64, dtype=np.int32)])
                seq = serve(cache, tokens)
                assert seq.published_tokens >= seq.num_computed_tokens
                seq.free()
                report = cache.probe(tokens)
                assert report.num_recoverable_tokens + sum(loss.tokens for loss in report.losses) == 128
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=requests, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.probe(np.append(shared, 1)).num_recoverable_tokens == 64
    cache.check_invariants()
    assert all(pool["blocks_live"] == pool["blocks_reserved"] for pool in cache.stats()["pools"].values())
