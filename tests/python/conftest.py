"""Layouts small enough to count by hand, and one turn served against a cache, for the tests of the Python surface."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import hetkv
from hetkv import CacheLayout, DType, FieldSpec, GroupSpec, ObjectKind, Retention

pytest.register_assert_rewrite("request_machine", "row_copy_reference", "step_arrays")

F32 = DType.float32


@pytest.fixture(scope="session")
def hybrid_layout() -> CacheLayout:
    """Every retention once, block_size 16. Bytes of a block: full 2048, comp 256, win 1024, tail 256, state 256."""
    return CacheLayout.build(
        "hybrid",
        16,
        [
            GroupSpec(
                "full",
                ObjectKind.full_kv,
                Retention.history,
                owner_layers=[0, 2],
                fields=[FieldSpec("k", F32, [2, 4]), FieldSpec("v", F32, [2, 4])],
            ),
            GroupSpec(
                "comp",
                ObjectKind.compressed_kv,
                Retention.history,
                owner_layers=[1],
                fields=[FieldSpec("kv", F32, [8])],
                compress_ratio=4,
            ),
            GroupSpec(
                "win", ObjectKind.swa_window, Retention.window, owner_layers=[1, 3], fields=[FieldSpec("k", F32, [8])], window=20
            ),
            GroupSpec(
                "tail",
                ObjectKind.uncompressed_tail,
                Retention.tail,
                owner_layers=[1],
                fields=[FieldSpec("kv", F32, [4]), FieldSpec("overlap_kv", F32, [4], overlap=True)],
                compress_ratio=4,
                overlap_rows=4,
            ),
            GroupSpec(
                "state", ObjectKind.recurrent_state, Retention.snapshot, owner_layers=[4], fields=[FieldSpec("s", F32, [3])]
            ),
        ],
    )


@pytest.fixture(scope="session")
def plain_layout() -> CacheLayout:
    """One full_kv group of one byte a token, block_size 256, so that very long prompts cost little."""
    return CacheLayout.build(
        "plain",
        256,
        [GroupSpec("kv", ObjectKind.full_kv, Retention.history, owner_layers=[0], fields=[FieldSpec("kv", DType.uint8, [1])])],
    )


@pytest.fixture
def cache(hybrid_layout: CacheLayout) -> hetkv.Cache:
    return hetkv.Cache(hybrid_layout, "1MiB", secret=1, retention="all")


ServeTurn = Callable[..., hetkv.Sequence]


@pytest.fixture
def serve() -> ServeTurn:
    """Admits a prompt, runs it in chunks that end at block boundaries, stages and publishes on the way; returns the sequence."""

    def turn(cache: hetkv.Cache, tokens: npt.NDArray[np.int32], **options: object) -> hetkv.Sequence:
        seq = cache.admit(tokens, **options)  # type: ignore[arg-type]
        run_to_end(seq, cache.layout.block_size)
        return seq

    return turn


def run_to_end(seq: hetkv.Sequence, block_size: int) -> None:
    while seq.scheduled < seq.num_tokens:
        upto = min(seq.num_tokens, (seq.scheduled // block_size + 1) * block_size)
        assert seq.settle(seq.schedule(upto))
        if upto % block_size == 0:
            seq.commit_point(upto, dict.fromkeys(seq.stage_point(upto), upto))
        seq.publish()


@pytest.fixture
def prompt() -> npt.NDArray[np.int32]:
    """100 tokens: six whole blocks of 16 and 4 more."""
    return np.random.default_rng(0).integers(0, 1000, 100, dtype=np.int32)
