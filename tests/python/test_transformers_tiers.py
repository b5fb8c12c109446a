"""Real models whose prefixes come back from disk: the bits of the run that made them, over every token that follows."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import hetkv  # noqa: E402
from hetkv.integrations.transformers import Generation, PrefixCache, Runner  # noqa: E402
from hetkv.integrations.transformers.attach import attach, detach  # noqa: E402
from tiny_models import BUILDERS, VOCABULARY  # noqa: E402

BLOCK = 64
NEW = 140


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def cache_for(model: nn.Module, **tiers: object) -> hetkv.Cache:
    layout = hetkv.layout_from_config(model.config, block_size=BLOCK, dtype="float32")
    return hetkv.Cache(layout, "16MiB", **tiers)  # type: ignore[arg-type]


def prompt_of(count: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def plain(prefixes: PrefixCache, prompt: list[int]) -> Generation:
    runner = Runner(prefixes.model, BLOCK)
    cache = prefixes.adapter.new_cache()
    return runner.decode(cache, runner.prefill(cache, prompt, 0), len(prompt), NEW)


def logits_equal(left: Generation, right: Generation) -> bool:
    return left.tokens == right.tokens and torch.equal(left.logits, right.logits)


@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_a_prefix_from_disk_continues_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = BUILDERS[family]()
    prompt = prompt_of(330, 1)
    prefixes = PrefixCache(model, cache_for(model, disk=tmp_path / "store"))
    expected = plain(prefixes, prompt)
    assert logits_equal(prefixes.generate(prompt, NEW), expected)
    prefixes.cache.flush()
    prefixes.close()
    del prefixes
    gc.collect()

    prefixes = PrefixCache(model, cache_for(model, disk=tmp_path / "store"))
    with prefixes.open(prompt, max_new_tokens=NEW) as session:
        assert session.report.num_restored_tokens == session.num_computed_tokens == 320
        assert session.report.canonical
        assert logits_equal(session.generate(NEW), expected)
    prefixes.close()


@pytest.mark.parametrize("family", ["deepseek_v4", "gpt_oss", "gemma3"])
def test_an_attached_model_resumes_from_disk(family: str, tmp_path: Path) -> None:
    model = BUILDERS[family]()
    prompt = prompt_of(330, 2)
    outputs, loaded = [], []
    for _ in range(2):
        attached = attach(model, cache_for(model, disk=tmp_path / "store"))
        try:
            outputs.append(attached.generate([prompt], NEW)[0])
            attached.cache.flush()
            loaded.append(attached.cache.stats()["restores"]["bytes"])
        finally:
            detach(model)
        del attached
        gc.collect()
    assert loaded[0] == 0 < loaded[1]
    first, second = outputs
    assert first.tokens == second.tokens
    # Attention has the same bits; a matrix product over other numbers of rows need not.
    assert float((first.logits - second.logits).abs().max()) <= 1e-4
