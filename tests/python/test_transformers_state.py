"""Cache state of five model families leaves a live transformers cache and comes back bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as memoise
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from hetkv.integrations.transformers import (  # noqa: E402
    GroupState,
    PrefixState,
    Retention,
    Runner,
    StateAdapter,
    TieRule,
    UnsupportedModelError,
    adapter_for,
)
from hetkv.tools.demo.models import build_model  # noqa: E402
from tiny_models import BUILDERS, VOCABULARY  # noqa: E402

BLOCK = 64
NEW_TOKENS = 160
PROMPT = 300


@dataclass(frozen=True)
class Run:
    """One uninterrupted run: the states that it passed over, and every logits row from the first token on."""

    adapter: StateAdapter
    runner: Runner
    tokens: list[int]
    states: dict[int, PrefixState]
    logits: torch.Tensor  # [len(tokens), vocabulary]; rows of decoded tokens after the prompt's


def _clone(state: PrefixState) -> PrefixState:
    return {group: {field: rows.clone() for field, rows in fields.items()} for group, fields in state.items()}


@memoise
def run_of(family: str) -> Run:
    torch.set_num_threads(1)
    model = BUILDERS[family]()
    TieRule(model)
    adapter, runner = adapter_for(model), Runner(model, BLOCK)
    tokens = torch.randint(0, VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(7)).tolist()
    states: dict[int, PrefixState] = {}
    cache = adapter.new_cache()

    def keep(live: Any, position: int) -> None:
        # Every block boundary, and two places inside the decoded part.
        if position % BLOCK == 0 or position in (PROMPT + 3, PROMPT + 55):
            states[position] = adapter.export_state(live)

    prompt_logits = runner.prefill(cache, tokens, 0, after_chunk=keep, all_logits=True)
    generation = runner.decode(cache, prompt_logits, PROMPT, NEW_TOKENS + BLOCK, after_token=keep)
    logits = torch.cat([prompt_logits[:-1], generation.logits])
    return Run(adapter, runner, tokens + generation.tokens, states, logits)


def resumed_logits(run: Run, position: int, state: PrefixState, end: int) -> torch.Tensor:
    """Logits of tokens [position, end), the prompt's part in chunks, the rest one by one, on a fresh cache with `state`."""
    cache = run.adapter.restore(position, state)
    rows = []
    if position < PROMPT:
        rows.append(run.runner.prefill(cache, run.tokens[:PROMPT], position, all_logits=True))
    for n in range(max(position, PROMPT), end):
        rows.append(run.runner.step(cache, run.tokens[n : n + 1]))
    return torch.cat(rows)


@pytest.mark.parametrize("family", BUILDERS)
def test_resume_is_bit_identical_over_160_tokens(family: str) -> None:
    run = run_of(family)
    # Chunk-made at 64, 256; unaligned at the prompt's end and in the decoded part; decode-made at 320 (the only one with HCA tail
    # rows at a block boundary).
    for position in (64, 256, PROMPT + 3, 320):
        end = max(position, PROMPT) + NEW_TOKENS
        resumed = resumed_logits(run, position, run.states[position], end)
        difference = (resumed - run.logits[position:end]).abs().max().item()
        assert difference == 0.0, f"{family}: resuming at {position} differs by {difference}"


def _items(run: Run, position: int) -> list[tuple[GroupState, str, int]]:
    """Oldest, middle and newest row of every field of every group at `position`."""
    found = []
    for group in run.adapter.groups:
        for field, rows in run.states[position][group.name].items():
            count = rows.shape[1]
            found += [(group, field, row) for row in sorted({0, count // 2, count - 1}) if count]
    return found


@pytest.mark.parametrize("family", BUILDERS)
def test_every_item_of_the_state_matters(family: str) -> None:
    """Zero one row of one field: the logits change by 1e-2 or more within 160 tokens. R(p) asks for nothing idle."""
    run = run_of(family)
    position = PROMPT + 55 if family == "deepseek_v4" else 192  # unaligned where there are tails: 355 = 2*128 + 99 = 4*88 + 3
    following = run.tokens[position : position + NEW_TOKENS]

    def logits_with(state: PrefixState) -> torch.Tensor:
        return run.runner.step(run.adapter.restore(position, state), following, keep=0)

    intact = logits_with(run.states[position])
    items = _items(run, position)
    assert {group.name for group, _, _ in items} == {group.name for group in run.adapter.groups}
    for group, field, row in items:
        state = _clone(run.states[position])
        state[group.name][field][:, row] = 0
        changed = (logits_with(state) - intact).abs().max().item()
        assert changed >= 1e-2, f"{family}: zeroing row {row} of {group.name}.{field} changes the logits by {changed} only"


def test_aligned_positions_ask_for_no_tail_rows() -> None:
    run = run_of("deepseek_v4")
    at_256, at_320 = run.states[256], run.states[320]
    assert at_256["hca_tail"]["kv"].shape[1] == 0
    assert at_256["csa_tail"]["kv"].shape[1] == 0
    assert at_256["csa_tail"]["overlap_kv"].shape[1] == 4
    assert at_320["hca_tail"]["kv"].shape[1] == 64
    trimmed = _clone(at_256)
    del trimmed["hca_tail"]
    for name in ("csa_tail", "csa_index_tail"):
        del trimmed[name]["kv"], trimmed[name]["gate"]
    resumed = resumed_logits(run, 256, trimmed, PROMPT)
    assert torch.equal(resumed, run.logits[256:PROMPT])


def test_no_overlap_below_one_window() -> None:
    run = run_of("deepseek_v4")
    cache = run.adapter.new_cache()
    run.runner.step(cache, run.tokens[:3])
    state = run.adapter.export_state(cache)
    assert set(state["csa_tail"]) == {"kv", "gate"}
    assert state["csa_kv"]["kv"].shape[1] == 0
    again = run.adapter.restore(3, state)
    assert torch.equal(run.runner.step(again, run.tokens[3:20]), run.runner.step(cache, run.tokens[3:20]))


@pytest.mark.parametrize("family", ["deepseek_v4", "gpt_oss"])
def test_rows_slid_out_of_the_window_are_refused(family: str) -> None:
    run = run_of(family)
    cache = run.adapter.restore(256, run.states[256])
    swa = run.adapter.group("swa")
    run.adapter.export_window(cache, swa, 129, 256)
    with pytest.raises(ValueError, match=r"\[129, 256\)"):
        run.adapter.export_window(cache, swa, 128, 256)


def test_importing_needs_a_fresh_cache_and_whole_rows() -> None:
    run = run_of("deepseek_v4")
    state = run.states[256]
    used = run.adapter.restore(256, state)
    with pytest.raises(ValueError, match="already holds tokens"):
        run.adapter.fill(used, 256, state)
    lacking = _clone(state)
    del lacking["csa_index"]
    with pytest.raises(ValueError, match="csa_index"):
        run.adapter.restore(256, lacking)
    short = _clone(state)
    short["swa"]["kv"] = short["swa"]["kv"][:, 1:]
    with pytest.raises(ValueError, match="127 rows"):
        run.adapter.restore(256, short)


def test_importing_registers_no_layer_class() -> None:
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

    before = dict(DYNAMIC_LAYER_TYPE_MAPPING)
    run = run_of("deepseek_v4")
    run.adapter.restore(256, run.states[256])
    assert before == DYNAMIC_LAYER_TYPE_MAPPING


def test_unknown_models_are_refused_by_name() -> None:
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedModelError, match="'llama' is not served"):
        adapter_for(transformers.LlamaForCausalLM(config).eval())
    with pytest.raises(UnsupportedModelError, match="training mode"):
        adapter_for(build_model("gpt_oss", 16, 0).train())
    with pytest.raises(UnsupportedModelError, match="no transformers model"):
        adapter_for(nn.Linear(2, 2))


def test_recurrent_state_exists_only_where_it_was_saved() -> None:
    run = run_of("qwen3_next")
    assert run.adapter.group("gdn").retention is Retention.SNAPSHOT
    wrong = _clone(run.states[192])
    wrong["gdn"] = run.states[128]["gdn"]  # the right rows, an older snapshot
    changed = (resumed_logits(run, 192, wrong, PROMPT) - run.logits[192:PROMPT]).abs().max().item()
    assert changed > 1e-2
