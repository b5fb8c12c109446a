"""Requests on real models through a real cache: exact resumes, every way to run the model, and clear refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import hetkv  # noqa: E402
from hetkv.integrations.transformers import (  # noqa: E402
    ABI_FAMILY,
    LOWEST_INDEX,
    Generation,
    PrefixCache,
    Runner,
    Session,
    TokenCounter,
    UnsupportedModelError,
    adapter_for,
)
from hetkv.tools.demo.models import build_model, draw_weights  # noqa: E402
from tiny_models import BUILDERS, VOCABULARY  # noqa: E402

BLOCK = 64
NEW = 70


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _cache_for(model: nn.Module, block_size: int = BLOCK, capacity: str = "16MiB", **options: object) -> hetkv.Cache:
    layout = hetkv.layout_from_config(model.config, block_size=block_size, dtype="float32")
    return hetkv.Cache(layout, capacity, **options)  # type: ignore[arg-type]


def _served(family: str, block_size: int = BLOCK, **options: object) -> PrefixCache:
    model = BUILDERS[family]()
    return PrefixCache(model, _cache_for(model, block_size, **options))


def _prompt(count: int, seed: int = 1) -> list[int]:
    tokens: list[int] = torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def _plain(prefixes: PrefixCache, prompt: list[int], new: int, block_size: int = BLOCK) -> Generation:
    """The same request without hetkv, on the same schedule."""
    runner = Runner(prefixes.model, block_size)
    cache = prefixes.adapter.new_cache()
    return runner.decode(cache, runner.prefill(cache, prompt, 0), len(prompt), new)


def _ask(prefixes: PrefixCache, prompt: list[int], new: int) -> tuple[Session, Generation]:
    with prefixes.open(prompt, max_new_tokens=new) as session:
        return session, session.generate(new)


@pytest.mark.parametrize("family", BUILDERS)
def test_a_second_request_resumes_exactly(family: str) -> None:
    prefixes = _served(family)
    counter = TokenCounter(prefixes.model)
    prompt = _prompt(300)
    expected = _plain(prefixes, prompt, NEW)
    for hit in (0, 256):
        counted = counter.total
        session, answer = _ask(prefixes, prompt, NEW)
        assert session.num_computed_tokens == hit
        assert session.report.num_recoverable_tokens == hit
        assert counter.total - counted == len(prompt) - hit + NEW - 1
        assert answer.tokens == expected.tokens
        assert torch.equal(answer.logits, expected.logits)
    prefixes.cache.check_invariants()


@pytest.mark.parametrize("family", BUILDERS)
def test_the_next_turn_equals_the_uninterrupted_conversation(family: str) -> None:
    """Resumes from rows that decoding made, inside the answer: bit for bit as if the first cache had lived on."""
    prefixes = _served(family)
    prompt = _prompt(200)
    _, answer = _ask(prefixes, prompt, NEW)
    following = [*prompt, *answer.tokens, *_prompt(30, 2)]
    # 256 of the 269 computed tokens: the uninterrupted run stops there, and computes the rest in chunks.
    runner, cache = Runner(prefixes.model, BLOCK), prefixes.adapter.new_cache()
    runner.prefill(cache, prompt, 0)
    for token in following[200:256]:
        runner.step(cache, [token])
    expected = runner.decode(cache, runner.prefill(cache, following, 256), len(following), NEW)
    session, again = _ask(prefixes, following, NEW)
    assert session.num_computed_tokens == 256
    assert torch.equal(again.logits, expected.logits)
    cold = _plain(prefixes, following, NEW)
    assert again.tokens == cold.tokens
    assert (again.logits - cold.logits).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["deepseek_v4", "gemma3"])
def test_blocks_longer_than_the_window(family: str) -> None:
    """Block 256, window 128: a block's older rows have left the model's cache before it is full, and nobody needs them."""
    prefixes = _served(family, block_size=256)
    prompt = _prompt(600)
    expected = _plain(prefixes, prompt, NEW, 256)
    for hit in (0, 512):
        session, answer = _ask(prefixes, prompt, NEW)
        assert session.num_computed_tokens == hit
        assert torch.equal(answer.logits, expected.logits)


@pytest.mark.parametrize("family", ["deepseek_v4", "gpt_oss"])
def test_generate_of_transformers(family: str) -> None:
    prefixes = _served(family)
    prompt = _prompt(300)
    ids = torch.tensor([prompt])
    expected = _plain(prefixes, prompt, NEW).tokens
    for hit in (0, 256):
        with prefixes.open(ids, max_new_tokens=NEW) as session:
            assert session.num_computed_tokens == hit
            out = prefixes.model.generate(  # type: ignore[operator]
                ids, cache=session.cache, max_new_tokens=NEW, do_sample=False, prefill_chunk_size=BLOCK, pad_token_id=0
            )
            assert session.length == 300 + NEW - 1
        assert out[0, 300:].tolist() == expected
    # Its generated tokens are there for the next turn.
    assert prefixes.cache.probe([*prompt, *expected]).num_recoverable_tokens == 320


def test_forward_of_the_model() -> None:
    prefixes = _served("gemma3")
    prompt = _prompt(130)
    with prefixes.open(prompt) as session, torch.no_grad():
        for begin, end in ((0, 64), (64, 128), (128, 130)):
            prefixes.model(input_ids=torch.tensor([prompt[begin:end]]), cache=session.cache)
    assert prefixes.cache.probe(prompt).num_recoverable_tokens == 128


def test_interleaved_sessions() -> None:
    prefixes = _served("deepseek_v4")
    first, second = _prompt(150, 3), _prompt(150, 4)
    expected = [_plain(prefixes, prompt, 40) for prompt in (first, second)]
    with prefixes.open(first, max_new_tokens=40) as a, prefixes.open(second, max_new_tokens=40) as b:
        logits = [a.prefill(), b.prefill()]
        answers = [b.decode(logits[1], 40), a.decode(logits[0], 40)]
    assert torch.equal(answers[1].logits, expected[0].logits)
    assert torch.equal(answers[0].logits, expected[1].logits)


def test_namespaces_share_nothing() -> None:
    prefixes = _served("gpt_oss")
    prompt = _prompt(200)
    ours, theirs = prefixes.cache.namespace(salt="ours"), prefixes.cache.namespace(salt="theirs")
    prefixes.generate(prompt, 4, namespace=ours)
    assert prefixes.cache.probe(prompt, ours).num_recoverable_tokens == 192
    assert prefixes.cache.probe(prompt, theirs).num_hash_hit_tokens == 0
    assert prefixes.cache.probe(prompt).num_hash_hit_tokens == 0


def test_recurrent_state_resumes_at_saved_snapshots_only() -> None:
    prefixes = _served("qwen3_next", retention="turn_ends")
    prompt = _prompt(400)
    prefixes.generate(prompt, 4)
    # History is there for all 384 tokens; state only where the policy saved it.
    report = prefixes.cache.probe([*prompt[:300], *_prompt(100, 9)])
    assert report.num_history_tokens == 256
    assert report.num_recoverable_tokens == 0
    assert report.lost("group_missing", "gdn") == 256
    session, answer = _ask(prefixes, prompt, 10)
    assert session.num_computed_tokens == 384
    assert torch.equal(answer.logits, _plain(prefixes, prompt, 10).logits)


def test_weights_that_change_during_a_request_are_not_published() -> None:
    prefixes = _served("gpt_oss", model_version="w0")
    prompt = _prompt(200)
    with prefixes.open(prompt, max_new_tokens=80) as session:
        logits = session.prefill()
        draw_weights(prefixes.model, 1)
        prefixes.cache.set_model_version("w1")
        tokens = session.decode(logits, 80).tokens
    assert prefixes.cache.probe([*prompt, *tokens]).num_recoverable_tokens == 0
    prefixes.cache.set_model_version("w0")
    assert prefixes.cache.probe([*prompt, *tokens]).num_recoverable_tokens == 192


def test_a_failing_request_gives_its_memory_back() -> None:
    prefixes = _served("gemma3", retention="none")
    before = prefixes.cache.stats()["kinds"]

    def broken_request() -> None:
        with prefixes.open(_prompt(60), max_new_tokens=100) as session:
            session.prefill()
            raise RuntimeError("the model broke")

    with pytest.raises(RuntimeError, match="the model broke"):
        broken_request()
    assert prefixes.cache.stats()["kinds"] == before
    assert not prefixes.model._forward_hooks
    assert not prefixes.model._forward_pre_hooks


def test_a_request_that_cannot_fit_is_refused_and_changes_nothing() -> None:
    prefixes = _served("gpt_oss", capacity="1MiB")
    with pytest.raises(hetkv.AdmissionError) as refusal:
        prefixes.open(_prompt(100_000))
    assert not refusal.value.retryable
    assert not prefixes.model._forward_hooks
    prefixes.generate(_prompt(100), 4)


# --- what cannot be served ---


@pytest.fixture(scope="module")
def gemma() -> PrefixCache:
    return _served("gemma3")


def _forward(prefixes: PrefixCache, session: Session, ids: list[list[int]], **more: object) -> None:
    with torch.no_grad():
        prefixes.model(input_ids=torch.tensor(ids), cache=session.cache, **more)


def test_batches_are_refused(gemma: PrefixCache) -> None:
    prompt = _prompt(20)
    with pytest.raises(UnsupportedModelError, match="batch of 2"):
        gemma.open(torch.tensor([prompt, prompt]))
    with gemma.open(prompt) as session, pytest.raises(UnsupportedModelError, match="batch of 2"):
        _forward(gemma, session, [prompt, prompt])


def test_padding_is_refused(gemma: PrefixCache) -> None:
    prompt = _prompt(20)
    mask = torch.ones((1, 20), dtype=torch.long)
    mask[0, :3] = 0
    with gemma.open(prompt) as session:
        with pytest.raises(UnsupportedModelError, match="holes"):
            _forward(gemma, session, [prompt], attention_mask=mask)
        with pytest.raises(UnsupportedModelError, match="padding"):
            _forward(gemma, session, [prompt], position_ids=torch.arange(-3, 17)[None])
        with pytest.raises(UnsupportedModelError, match="holes"):
            gemma.model.generate(  # type: ignore[operator]
                torch.tensor([prompt]), attention_mask=mask, cache=session.cache, max_new_tokens=2, pad_token_id=0
            )


def test_passes_across_a_block_boundary_are_refused(gemma: PrefixCache) -> None:
    prompt = _prompt(100)
    with gemma.open(prompt) as session, pytest.raises(UnsupportedModelError, match=r"\[0, 100\) crosses the block boundary 64"):
        _forward(gemma, session, [prompt])


def test_other_tokens_than_admitted_are_refused(gemma: PrefixCache) -> None:
    prompt = _prompt(20)
    with gemma.open(prompt) as session, pytest.raises(ValueError, match="other tokens"):
        _forward(gemma, session, [[*prompt[:5], (prompt[5] + 1) % VOCABULARY]])


def test_embeddings_are_refused(gemma: PrefixCache) -> None:
    with gemma.open(_prompt(20)) as session, pytest.raises(UnsupportedModelError, match="no input_ids"), torch.no_grad():
        gemma.model(inputs_embeds=torch.zeros((1, 4, 64)), cache=session.cache)


def test_a_cache_changed_behind_the_session_is_refused(gemma: PrefixCache) -> None:
    prompt = _prompt(20)
    with gemma.open(prompt) as session:
        _forward(gemma, session, [prompt[:10]])
        session.cache.crop(-2)
        with pytest.raises(UnsupportedModelError, match="holds 8 tokens, the session computed 10"):
            _forward(gemma, session, [prompt[10:]])


def test_static_caches_are_refused(gemma: PrefixCache) -> None:
    static = transformers.StaticCache(config=gemma.model.config, max_cache_len=64)
    with gemma.open(_prompt(20)), pytest.raises(UnsupportedModelError, match="static cache"), torch.no_grad():
        gemma.model(input_ids=torch.tensor([_prompt(20)]), cache=static)
    model = build_model("gemma3", VOCABULARY, 0)
    model.generation_config.cache_implementation = "static"  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match="'static' cache"):
        PrefixCache(model, gemma.cache)


def test_other_caches_of_the_model_are_left_alone(gemma: PrefixCache) -> None:
    prompt = _prompt(100)
    with gemma.open(prompt) as session:
        Runner(gemma.model, BLOCK).step(adapter_for(gemma.model).new_cache(), prompt)
        assert session.length == session.num_computed_tokens


def test_model_and_cache_must_agree(gemma: PrefixCache) -> None:
    with pytest.raises(UnsupportedModelError, match="groups"):
        PrefixCache(build_model("deepseek_v4", VOCABULARY, 0), gemma.cache)
    with pytest.raises(UnsupportedModelError, match="'full'"):
        PrefixCache(build_model("gpt_oss", VOCABULARY, 0), gemma.cache)
    half = hetkv.Cache(hetkv.layout_from_config(gemma.model.config, block_size=BLOCK, dtype="bfloat16"), "4MiB")
    with pytest.raises(UnsupportedModelError, match="laid out for bfloat16"):
        PrefixCache(gemma.model, half)


def test_the_tie_rule_is_part_of_the_abi() -> None:
    prefixes = _served("deepseek_v4")
    assert prefixes.cache.abi[ABI_FAMILY] == LOWEST_INDEX
    prompt = _prompt(200)
    prefixes.generate(prompt, 4)
    assert prefixes.cache.probe(prompt).num_recoverable_tokens == 192
    prefixes.cache.set_abi(ABI_FAMILY, 0)
    report = prefixes.cache.probe(prompt)
    assert report.num_recoverable_tokens == 0
    assert report.lost("abi") == 192
