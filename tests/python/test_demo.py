"""The demo itself: its workload, its verdicts, and that it notices wrong bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

from hetkv.integrations.transformers.rows import RowStore
from hetkv.tools import cli
from hetkv.tools.demo.models import MODEL_NAMES
from hetkv.tools.demo.reference import Origin
from hetkv.tools.demo.results import LostTokens, TurnResult
from hetkv.tools.demo.serving import ServedModel
from hetkv.tools.demo.tokenizer import Tokenizer, corpus
from hetkv.tools.demo.workload import MAX_PROMPT_TOKENS, Workload


def _run(arguments: list[str], directory: Path) -> tuple[int, dict[str, Any]]:
    path = directory / "demo.json"
    status = cli.main(["demo", "--model", "gemma3", "--json", str(path), *arguments])
    document: dict[str, Any] = json.loads(path.read_text())
    return status, document


def test_the_demo_runs_and_keeps_every_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = _run(["--turns", "4"], tmp_path)
    assert status == 0
    assert document["ok"]
    (model,) = document["models"]
    assert len(model["turns"]) == 4
    assert sum(turn["recoverable_tokens"] for turn in model["turns"]) > 0
    for row in [*model["turns"], *model["provocations"]]:
        assert row["difference_schedule"] == 0.0
        assert row["difference_cold"] <= 1e-4
        assert row["tokens_equal"]
        assert row["decoded_tokens"] == 160
        assert row["computed_tokens"] == row["prompt_tokens"] - row["recoverable_tokens"]
    assert {"decoding", "chunks"} <= {row["origin"] for row in [*model["turns"], *model["provocations"]]}
    expected = ["", "window_evicted", "incomplete", "model_version", "", "abi", "layout"]
    assert [row["expected_reason"] for row in model["provocations"]] == expected
    for row in model["provocations"]:
        if row["expected_reason"]:
            assert row["expected_reason"] in {loss["reason"] for loss in row["losses"]}
            assert row["recoverable_tokens"] < row["recoverable_before"]
    assert {item["group"] for item in model["sensitivity"]} == {"full", "swa"}
    printed = capsys.readouterr().out
    assert "windows evicted" in printed
    assert "all outputs as promised" in printed
    assert "\x1b[" not in printed  # no terminal: plain lines


def test_a_second_run_with_a_store_starts_warm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--turns", "3", "--store", str(tmp_path / "store")]
    documents = []
    for _ in range(2):
        status, document = _run(arguments, tmp_path)
        assert status == 0
        documents.append(document["models"][0])
    first, second = documents
    assert sum(turn["restored_tokens"] for turn in first["turns"]) == 0
    for before, after in zip(first["turns"], second["turns"], strict=True):
        assert after["recoverable_tokens"] >= before["recoverable_tokens"]
        assert after["restored_tokens"] == after["recoverable_tokens"] - before["recoverable_tokens"] > 0
        assert after["difference_schedule"] == 0.0
    assert "earlier" in {turn["origin"] for turn in second["turns"]}
    assert "no faults" in capsys.readouterr().out


def test_a_store_with_a_damaged_bundle_is_slower_not_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--turns", "2", "--store", str(tmp_path / "store")]
    assert _run(arguments, tmp_path)[0] == 0
    bundle = next(path for path in (tmp_path / "store").rglob("*-h-4-*"))
    data = bytearray(bundle.read_bytes())
    data[-5000] ^= 1
    bundle.write_bytes(data)
    status, document = _run(arguments, tmp_path)
    assert status == 0
    assert document["models"][0]["turns"][0]["recoverable_tokens"] < 576
    assert "1 checksum" in capsys.readouterr().out


def test_the_demo_fails_when_one_restored_row_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    intact = RowStore._read

    def damaged(self: RowStore, group: Any, position: int) -> Mapping[str, torch.Tensor]:
        rows = intact(self, group, position)
        if group.name == "swa":
            rows["k"][0, 5] = 0
        return rows

    monkeypatch.setattr(RowStore, "_read", damaged)
    status, document = _run(["--turns", "2"], tmp_path)
    assert status == 1
    turn = document["models"][0]["turns"][1]
    assert turn["origin"] == "unknown"
    assert turn["difference_cold"] > 1e-4
    assert "NOT AS PROMISED" in capsys.readouterr().out


def _result(**changes: Any) -> TurnResult:
    values: dict[str, Any] = {
        "label": "x", "prompt_tokens": 100, "hash_hit_tokens": 64, "recoverable_tokens": 64,
        "restored_tokens": 0, "losses": [LostTokens("granularity", None, 36)], "computed_tokens": 36, "decoded_tokens": 160,
        "origin": Origin.DECODING, "difference_schedule": 0.0, "difference_cold": 5e-6, "tokens_equal": True,
        "cold_first_token_ms": 1.0, "warm_first_token_ms": 1.0, "cold_ms": 1.0, "warm_ms": 1.0,
    }  # fmt: skip
    result = TurnResult(**(values | changes))
    result.judge()
    return result


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokens_equal": False}, "tokens differ"),
        ({"difference_schedule": 1e-9}, "same schedule"),
        ({"difference_cold": 2e-4}, "cold prefill"),
        ({"difference_cold": float("nan")}, "cold prefill"),
        ({"computed_tokens": 37}, "computed 37, not 36"),
        ({"origin": Origin.UNKNOWN}, "never computed"),
        ({"losses": []}, "do not sum"),
        ({"expected_reason": "abi", "recoverable_before": 64}, "no loss 'abi'"),
        ({"expected_reason": "granularity", "recoverable_before": 64}, "did not shrink"),
        ({"expected_reason": "", "losses": [LostTokens("abi", None, 36)]}, "still loses tokens to abi"),
    ],
)
def test_every_broken_promise_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    assert _result().ok
    broken = _result(**changes)
    assert not broken.ok
    assert any(problem in text for text in broken.problems)


def test_the_tokenizer_is_lossless_and_deterministic() -> None:
    tokenizer = Tokenizer()
    text = corpus()["with"] + " £ §"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == Tokenizer().encode(text)
    assert 0 <= min(ids) <= max(ids) < tokenizer.vocabulary
    assert len(ids) < len(text)


def test_the_workload_shares_branches_and_repeats() -> None:
    tokenizer = Tokenizer()

    def prompts(seed: int) -> list[list[int]]:
        load = Workload(tokenizer, seed)
        drawn = []
        for _ in range(12):
            turn = load.next_turn()
            drawn.append(turn.prompt)
            turn.finish([1] * 160)
        return drawn

    drawn = prompts(3)
    assert drawn == prompts(3)
    assert drawn != prompts(4)
    assert all(len(prompt) < MAX_PROMPT_TOKENS for prompt in drawn)
    assert drawn[0][:500] == drawn[2][:500]  # two users, one document
    assert drawn[1][: len(drawn[0])] == drawn[0]  # a conversation goes on
    branch = drawn[4]
    assert any(branch[: len(p) + 160] == [*p, *[1] * 160] and branch != p for p in drawn[:4])


def test_weight_versions_come_back() -> None:
    served = ServedModel("gemma3", 512, 0, "4MiB", lambda _: None)
    first = {name: value.clone() for name, value in served.model.state_dict().items()}
    served.set_version("w1")
    assert any(not torch.equal(value, first[name]) for name, value in served.model.state_dict().items())
    served.set_version("w0")
    assert all(torch.equal(value, first[name]) for name, value in served.model.state_dict().items())


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._MODELS == MODEL_NAMES
    for arguments in ([], ["demo", "--turns", "0"], ["demo", "--model", "llama"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    assert "not positive" in capsys.readouterr().err


def test_the_demo_runs_attached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = _run(["--attach", "--turns", "2"], tmp_path)
    assert status == 0
    (model,) = document["models"]
    assert [turn["recoverable_tokens"] > 0 for turn in model["turns"]] == [False, True]
    assert all(turn["difference"] <= 1e-4 for turn in model["turns"])
    assert model["batch_equal"]
    assert "times as fast as copying" in capsys.readouterr().out
