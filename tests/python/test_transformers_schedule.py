"""The compute schedule, the token counter and the tie rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from hetkv.integrations.transformers import (  # noqa: E402
    ABI_FAMILY,
    LOWEST_INDEX,
    Runner,
    TieRule,
    TokenCounter,
    adapter_for,
    chunk_ends,
    tie_rule_abi,
)
from hetkv.tools.demo.models import build_model  # noqa: E402

VOCABULARY = 256


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _prompt(count: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def test_chunks_end_at_every_block_boundary() -> None:
    assert list(chunk_ends(0, 130, 64)) == [(0, 64), (64, 128), (128, 130)]
    assert list(chunk_ends(64, 128, 64)) == [(64, 128)]
    assert list(chunk_ends(70, 75, 64)) == [(70, 75)]
    assert list(chunk_ends(64, 64, 64)) == []


def test_cold_and_resumed_chunks_are_the_same_chunks() -> None:
    cold = list(chunk_ends(0, 1000, 64))
    for position in range(0, 1000, 64):
        assert list(chunk_ends(position, 1000, 64)) == [chunk for chunk in cold if chunk[0] >= position]


def test_the_counter_sees_every_computed_token() -> None:
    model = build_model("gemma3", VOCABULARY, 0)
    counter = TokenCounter(model)
    adapter, runner = adapter_for(model), Runner(model, 64)
    cache = adapter.new_cache()
    logits = runner.prefill(cache, _prompt(150, 1), 0)
    assert counter.total == 150
    runner.decode(cache, logits, 150, 5)
    assert counter.total == 154  # the fifth token was chosen, not computed
    counter.remove()
    runner.step(cache, [1])
    assert counter.total == 154


def test_nothing_left_to_compute_is_refused() -> None:
    model = build_model("gpt_oss", VOCABULARY, 0)
    with pytest.raises(ValueError, match="nothing to compute"):
        Runner(model, 64).prefill(adapter_for(model).new_cache(), [1, 2], 2)


def _zero_scores(model: nn.Module) -> None:
    """Silences most of the indexer's heads, so that many scores are exactly zero and the k-th place is a tie."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("indexer.q_b_proj.weight"):
                parameter[parameter.shape[0] // 4 :] = 0


def _chunking_difference(model: nn.Module, tokens: list[int]) -> float:
    """Largest logit difference over the whole text between 64-token chunks and other splits of the same text."""
    adapter, runner = adapter_for(model), Runner(model, 64)
    expected = runner.prefill(adapter.new_cache(), tokens, 0, all_logits=True)
    worst = 0.0
    for splits in ((len(tokens),), (37, 301, len(tokens)), (400, 401, 402, 403, len(tokens))):
        cache, begin, rows = adapter.new_cache(), 0, []
        for end in splits:
            rows.append(runner.step(cache, tokens[begin:end], keep=0))
            begin = end
        worst = max(worst, (torch.cat(rows) - expected).abs().max().item())
    return worst


def test_the_tie_rule_makes_the_selection_independent_of_chunking() -> None:
    model = build_model("deepseek_v4", VOCABULARY, 0)
    _zero_scores(model)
    tokens = _prompt(520, 3)
    stock = _chunking_difference(model, tokens)
    with TieRule(model) as rule:
        assert rule.num_indexers == 2
        ruled = _chunking_difference(model, tokens)
    assert ruled <= 1e-4, f"with the rule the chunkings differ by {ruled}"
    assert stock >= 1e-2, f"without the rule they differ by {stock} only: the test has lost its teeth"


def test_removing_the_rule_restores_the_stock_indexer() -> None:
    model = build_model("deepseek_v4", VOCABULARY, 0)
    _zero_scores(model)
    tokens = _prompt(400, 5)
    before = Runner(model, 64).prefill(adapter_for(model).new_cache(), tokens, 0, all_logits=True)
    assert tie_rule_abi(model) == {ABI_FAMILY: 0}
    rule = TieRule(model)
    assert tie_rule_abi(model) == {ABI_FAMILY: LOWEST_INDEX}
    second = TieRule(model)
    assert not second.installed
    second.remove()
    assert rule.installed
    assert tie_rule_abi(model) == {ABI_FAMILY: LOWEST_INDEX}
    rule.remove()
    assert tie_rule_abi(model) == {ABI_FAMILY: 0}
    after = Runner(model, 64).prefill(adapter_for(model).new_cache(), tokens, 0, all_logits=True)
    assert torch.equal(before, after)


def test_the_rule_touches_one_model_instance_only() -> None:
    first, second = build_model("deepseek_v4", VOCABULARY, 0), build_model("deepseek_v4", VOCABULARY, 0)
    TieRule(first)
    assert tie_rule_abi(second) == {ABI_FAMILY: 0}


def test_models_without_an_indexer_have_no_tie_rule() -> None:
    model = build_model("gpt_oss", VOCABULARY, 0)
    assert TieRule(model).num_indexers == 0
    assert tie_rule_abi(model) == {}


def test_selected_entries_are_by_score_then_by_index() -> None:
    """The rule on the very calls that the indexers make: marked scores, masked, then `topk`."""
    from hetkv.integrations.transformers.tie_rule import _mark

    scores = torch.relu(torch.randn((3, 200), generator=torch.Generator().manual_seed(2)))
    marked: Any = _mark(nn.Identity(), None, scores.clone())
    chosen = marked.masked_fill(torch.zeros(200, dtype=torch.bool), 0.0).topk(150, dim=-1).indices
    assert type(chosen) is torch.Tensor
    for row in range(3):
        assert chosen[row].tolist() == sorted(range(200), key=lambda i: (-scores[row, i].item(), i))[:150]
