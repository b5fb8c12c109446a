"""Models that compute on hetkv's blocks, against transformers' own eager code: same greedy tokens, logits within 1e-4 in float32.

The reference is the stock model with its DynamicCache and the lowest-index tie rule, alone, on block-aligned chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

import hetkv  # noqa: E402
from hetkv.integrations.transformers import Generation, PrefixCache, Runner, TieRule, UnsupportedModelError, adapter_for  # noqa: E402
from hetkv.integrations.transformers.attach import AttachedModel, attach, detach  # noqa: E402
from hetkv.tools.demo.models import build_model  # noqa: E402
from tiny_models import BUILDERS, VOCABULARY  # noqa: E402

FAMILIES = ("deepseek_v4", "gpt_oss", "gemma3")
BLOCK = 64
BOUND = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return BUILDERS[request.param]()


@pytest.fixture
def attached(model: nn.Module) -> Iterator[AttachedModel]:
    served = attach(model, cache_for(model), max_tokens=200, max_sequence_tokens=2048)
    yield served
    served.detach()


def cache_for(model: nn.Module, capacity: str | int = "32MiB", **options: Any) -> hetkv.Cache:
    layout = hetkv.CacheLayout.from_config(model.config, block_size=BLOCK, dtype="float32")
    return hetkv.Cache(layout, capacity, **options)


def random_tokens(count: int, seed: int = 1) -> list[int]:
    tokens: list[int] = torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def stock(model: nn.Module, prompt: list[int], new: int) -> Generation:
    """The same request on transformers' own code. The model must not be attached."""
    with TieRule(model):
        runner = Runner(model, BLOCK)
        cache = adapter_for(model).new_cache()
        return runner.decode(cache, runner.prefill(cache, prompt, 0), len(prompt), new)


def check_equal(answer: Generation, expected: Generation) -> None:
    assert answer.tokens == expected.tokens
    assert float((answer.logits - expected.logits).abs().max()) <= BOUND


def test_decodes_as_eager_code_cold_and_from_a_hit(model: nn.Module) -> None:
    prompt = random_tokens(300)
    expected = stock(model, prompt, 260)
    served = attach(model, cache_for(model), max_tokens=200, max_sequence_tokens=1024)
    try:
        for hit in (0, 256):
            assert served.cache.probe(prompt).num_recoverable_tokens == hit
            check_equal(served.generate([prompt], 260)[0], expected)
        served.cache.check_invariants()
    finally:
        served.detach()


@pytest.mark.parametrize("max_tokens", [37, 130])
def test_ragged_batches_with_different_hits(model: nn.Module, max_tokens: int) -> None:
    """Prefill chunks of one request, cut anywhere, run beside decoding of others; every request has its own hit."""
    shared = random_tokens(260)
    prompts = [shared, shared[:130] + random_tokens(75, 2), random_tokens(1, 3), shared[:64] + random_tokens(200, 4)]
    expected = [stock(model, prompt, 30) for prompt in prompts]
    served = attach(model, cache_for(model), max_sequences=3, max_tokens=max_tokens, max_sequence_tokens=1024)
    try:
        check_equal(served.generate([shared], 1)[0], stock_first(expected[0]))
        for answer, reference in zip(served.generate(prompts, 30), expected, strict=True):
            check_equal(answer, reference)
        served.cache.check_invariants()
    finally:
        served.detach()


def stock_first(generation: Generation) -> Generation:
    return Generation(generation.tokens[:1], generation.logits[:1])


def test_generate_of_transformers_takes_the_paged_cache(model: nn.Module) -> None:
    prompt = random_tokens(140)
    expected = stock(model, prompt, 40)
    served = attach(model, cache_for(model), max_tokens=200, max_sequence_tokens=1024)
    try:
        for hit in (0, 128):
            with served.open(prompt, max_new_tokens=40) as request:
                assert request.num_computed_tokens == hit
                out = model.generate(  # type: ignore[operator]
                    torch.tensor([prompt]),
                    cache=request.cache,
                    max_new_tokens=40,
                    do_sample=False,
                    prefill_chunk_size=BLOCK,  # a tail can be published only where a pass ends
                )
            assert out[0, len(prompt) :].tolist() == expected.tokens
    finally:
        served.detach()


def test_what_is_published_is_what_the_ring_held(model: nn.Module) -> None:
    """A conversation resumed from its own decoding, turn after turn, stays on the reference of one run."""
    prompt = random_tokens(100)
    expected = stock(model, prompt, 200)
    served = attach(model, cache_for(model, retention="all"), max_tokens=200, max_sequence_tokens=1024)
    try:
        tokens = list(prompt)
        for turn in range(4):
            answer = served.generate([tokens], 50)[0]
            begin = 50 * turn
            check_equal(answer, Generation(expected.tokens[begin : begin + 50], expected.logits[begin : begin + 50]))
            tokens += answer.tokens
            assert served.cache.probe(tokens).num_recoverable_tokens == (len(tokens) - 1) // BLOCK * BLOCK
    finally:
        served.detach()


class LargestTensor(TorchDispatchMode):
    """The most bytes that one op's output owns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and not func.is_view:
                self.bytes = max(self.bytes, value.untyped_storage().nbytes() if value._base is None else 0)
        return result


def test_a_step_allocates_nothing_as_large_as_the_history(model: nn.Module) -> None:
    served = attach(model, cache_for(model, "64MiB"), max_tokens=64, max_sequence_tokens=4096)
    try:
        with served.open(random_tokens(3000), max_new_tokens=8) as request:
            while request.length < 2999:
                served.run([request], [min(request.next_chunk(64), 2999 - request.length)])
            with LargestTensor() as largest:
                served.run([request], [1])
        history = min(
            3000 // group.compress_ratio * group.layer_stride // group.entries_per_block
            for group in served.cache.layout.groups
            if group.retention is hetkv.Retention.history and not group.spec.indexes
        )
        parameters = max(parameter.nbytes for parameter in model.parameters())
        assert largest.bytes < max(history, parameters)
        assert largest.bytes < history or model.config.model_type == "deepseek_v4"
    finally:
        served.detach()


def test_detach_gives_the_stock_model_back(model: nn.Module) -> None:
    prompt = random_tokens(90)
    expected = stock(model, prompt, 20)
    attach(model, cache_for(model))
    detach(model)
    after = stock(model, prompt, 20)
    assert after.tokens == expected.tokens
    assert torch.equal(after.logits, expected.logits)
    with pytest.raises(UnsupportedModelError, match="not attached"):
        detach(model)


@torch.no_grad()
def test_refusals_name_what_is_wrong(model: nn.Module, attached: AttachedModel) -> None:
    ids = torch.tensor([random_tokens(20)])
    with pytest.raises(UnsupportedModelError, match="attached already"):
        attach(model, cache_for(model))
    with pytest.raises(UnsupportedModelError, match="pass a PagedCache"):
        model(ids)
    with pytest.raises(UnsupportedModelError, match="pass a PagedCache"):
        model(ids, cache=transformers.DynamicCache(config=model.config))
    with attached.open(ids[0].tolist(), max_new_tokens=4) as request:
        with pytest.raises(UnsupportedModelError, match="holes"):
            model(ids, cache=request.cache, attention_mask=torch.tensor([[0] + [1] * 19]))
        with pytest.raises(UnsupportedModelError, match="attention on blocks is causal"):
            model(ids, cache=request.cache, attention_mask=torch.zeros(1, 1, 20, 20))
        with pytest.raises(UnsupportedModelError, match="position_ids other than"):
            model(ids, cache=request.cache, position_ids=torch.arange(1, 21)[None])
        with pytest.raises(ValueError, match="other tokens"):
            model((ids + 1) % VOCABULARY, cache=request.cache)
        with pytest.raises(UnsupportedModelError, match="2 rows"):
            model(ids.expand(2, -1), cache=request.cache)
        with pytest.raises(UnsupportedModelError, match="cropped"):
            request.cache.crop(-1)
        out = model(ids, cache=request.cache)  # nothing of this has harmed the request
        assert out.logits.shape[1] == 20
    with pytest.raises(ValueError, match="empty prompt"):
        attached.open([])
    with pytest.raises(ValueError, match="at most 2048 together"):
        attached.open([1] * 2000, max_new_tokens=49)
    with pytest.raises(ValueError, match="max_new_tokens = 0"):
        attached.generate([[1]], 0)


def test_a_model_that_cannot_be_attached_is_named() -> None:
    other = BUILDERS["qwen3_next"]()
    with pytest.raises(UnsupportedModelError, match="qwen3_next"):
        attach(other, cache_for(other))


def fail(*_: Any) -> None:
    raise RuntimeError("stop here")


def test_a_pass_that_raises_can_be_repeated(model: nn.Module, attached: AttachedModel) -> None:
    prompt = random_tokens(150)
    with attached.open(prompt, max_new_tokens=1) as request:
        hook = model.lm_head.register_forward_hook(fail)  # type: ignore[union-attr,arg-type]
        with pytest.raises(RuntimeError, match="stop here"):
            attached.run([request], [64])
        hook.remove()
        assert request.length == 0
        while request.length < len(prompt):
            logits = attached.run([request], [request.next_chunk(200)])
    attached.detach()
    expected = stock(model, prompt, 1)
    assert float((logits[-1] - expected.logits[0]).abs().max()) <= BOUND


@torch.no_grad()
def test_a_pass_without_a_step_writes_nothing(model: nn.Module, attached: AttachedModel) -> None:
    """The tables of the last step are still in the cache: a pass that no hook prepares would write over rows that count."""
    ids = torch.tensor([random_tokens(128)])
    inner: Any = model.model
    with attached.open(ids[0].tolist()) as request:
        model(ids[:, :64], cache=request.cache)
        with attached.step([request], [64]) as step:
            model(**step.inputs)
        before = attached.cache.arena.clone()
        for call, arguments in (
            (inner, {"cache": request.cache}),
            (model.forward, {"cache": request.cache}),
            (model, step.inputs),
        ):
            with pytest.raises(UnsupportedModelError, match="no step"):
                call(**{"input_ids": ids[:, 64:], **arguments})
        assert torch.equal(attached.cache.arena, before)
    attached.detach()
    with pytest.raises(UnsupportedModelError, match="no step"):
        model(ids[:, 64:], cache=request.cache)


@torch.no_grad()
def test_a_pass_that_raises_leaves_the_rings_as_they_were(model: nn.Module, attached: AttachedModel) -> None:
    """The raised pass has written rows of its own into the rings, over those that the next windows read."""
    prompt = random_tokens(300)
    with attached.open(prompt, max_new_tokens=1) as request:
        while request.length < len(prompt):
            count = request.next_chunk(37)
            hook = model.lm_head.register_forward_hook(fail)  # type: ignore[union-attr,arg-type]
            with pytest.raises(RuntimeError, match="stop here"):
                attached.run([request], [count])
            with pytest.raises(RuntimeError, match="stop here"):
                model(torch.tensor([prompt[request.length :][:count]]), cache=request.cache)
            hook.remove()
            logits = attached.run([request], [count])
    with attached.open(prompt, max_new_tokens=1) as request:
        assert request.num_computed_tokens >= 256  # what was published is as good
        resumed = attached.run([request], [request.next_chunk(64)])
    attached.detach()
    expected = stock(model, prompt, 1)
    for rows in (logits, resumed):
        assert float((rows[-1] - expected.logits[0]).abs().max()) <= BOUND


def test_weights_loaded_while_attached_count_in_published_tails() -> None:
    """A published gate has the position bias added: that of the weights that made it."""
    model, other, prompt = BUILDERS["deepseek_v4"](), build_model("deepseek_v4", VOCABULARY, 1), random_tokens(150)
    expected, cache = stock(other, prompt, 4), cache_for(model)
    served = attach(model, cache, max_sequence_tokens=256)
    model.load_state_dict(other.state_dict())
    cache.set_model_version("w1")
    check_equal(served.generate([prompt], 4)[0], expected)
    served.detach()
    served = attach(model, cache, max_sequence_tokens=256)
    assert cache.probe(prompt).num_recoverable_tokens == 128
    check_equal(served.generate([prompt], 4)[0], expected)


def test_requests_wait_for_memory(model: nn.Module) -> None:
    prompts = [random_tokens(200, seed) for seed in range(4)]
    expected = [stock(model, prompt, 5) for prompt in prompts]
    probe = cache_for(model)
    need = probe.bytes_for(205, 64, live_state=True)
    served = attach(model, cache_for(model, max(2 * need, 3 << 19)), max_tokens=64, max_sequence_tokens=512)
    try:
        for answer, reference in zip(served.generate(prompts, 5), expected, strict=True):
            check_equal(answer, reference)
    finally:
        served.detach()


def test_a_cache_serves_stock_or_attached_attention_not_both(model: nn.Module) -> None:
    """Their rows differ in the last bits: entries of the other one do not match, and the other one is refused."""
    cache, prompt = cache_for(model), random_tokens(100)
    served = attach(model, cache, max_sequence_tokens=256)
    served.generate([prompt], 2)
    assert cache.probe(prompt).num_recoverable_tokens == 64
    served.detach()
    assert cache.probe(prompt).num_recoverable_tokens == 0
    assert {str(loss.reason) for loss in cache.probe(prompt).losses} == {"abi", "granularity"}
    reuse = PrefixCache(model, cache)
    reuse.generate(prompt, 2)
    reuse.close()
    served = attach(model, cache, max_sequence_tokens=256)
    assert cache.probe(prompt).num_recoverable_tokens == 64  # its own entries match again
    with pytest.raises(UnsupportedModelError, match="used by an attached model"):
        reuse.open(prompt)
    served.detach()
    with pytest.raises(UnsupportedModelError, match="used by a PrefixCache"):
        served.open(prompt)
