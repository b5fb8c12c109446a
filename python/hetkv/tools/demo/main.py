"""`hetkv demo`: a multi-turn load on tiny models, every answer checked against plain runs, and the usual faults provoked."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import hetkv

from .attached import run_attached
from .display import LEGEND, Display
from .models import MODEL_NAMES
from .provocations import Provocations
from .results import ModelResult
from .sensitivity import measure
from .serving import ServedModel
from .tokenizer import Tokenizer
from .workload import Workload

DEFAULT_TURNS = 10
# Less than what the load would fill, so that eviction is at work.
_DEFAULT_CAPACITY = {"deepseek_v4": "1MiB", "gpt_oss": "2MiB", "gemma3": "1536KiB"}
_THREADS = 1  # the models are tiny: a second thread costs more than it saves, and one thread is the same on every machine


@dataclass(frozen=True)
class DemoOptions:
    """What was asked for. capacity: of each arena, as text; None: the models' own defaults. attach: compute on blocks.
    store: a folder whose contents outlive the run."""

    models: tuple[str, ...] = MODEL_NAMES
    turns: int = DEFAULT_TURNS
    capacity: str | None = None
    seed: int = 0
    json_path: Path | None = None
    attach: bool = False
    store: Path | None = None


def run_demo(options: DemoOptions) -> int:
    """Runs the demo and prints it. Returns the exit status: 0 if every output was as promised, else 1."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(_THREADS)
    display = Display()
    tokenizer = Tokenizer()
    display.line(
        f"hetkv {hetkv.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, seed {options.seed}"
    )
    if options.attach:
        return _run_attached(tokenizer, options, display)
    display.line(LEGEND, "dim")
    started = time.perf_counter()
    results = [_run_model(name, tokenizer, options, display) for name in options.models]
    _summarise(results, time.perf_counter() - started, display)
    _write(options, [result.to_json() for result in results], all(result.ok for result in results), display)
    return 0 if all(result.ok for result in results) else 1


def _run_attached(tokenizer: Tokenizer, options: DemoOptions, display: Display) -> int:
    results = [
        run_attached(
            name,
            tokenizer,
            turns=options.turns,
            capacity=options.capacity or _DEFAULT_CAPACITY[name],
            seed=options.seed,
            line=display.line,
        )
        for name in options.models
    ]
    _write(options, [result.to_json() for result in results], all(result.ok for result in results), display)
    return 0 if all(result.ok for result in results) else 1


def _run_model(name: str, tokenizer: Tokenizer, options: DemoOptions, display: Display) -> ModelResult:
    started = time.perf_counter()
    capacity = options.capacity or _DEFAULT_CAPACITY[name]
    served = ServedModel(name, tokenizer.vocabulary, options.seed, capacity, display.progress, store=options.store)
    result = ModelResult(name, served.cache.arena.numel())
    workload = Workload(tokenizer, options.seed)
    prompt: list[int] = []
    with display.section(f"{name}: {options.turns} turns, arena of {capacity}"):
        for _ in range(options.turns):
            turn = workload.next_turn()
            row = served.answer(turn.prompt, turn.label)
            turn.finish(served.last_answer)
            prompt = turn.prompt
            result.turns.append(row)
            display.row(row)
    result.stats = served.cache.stats()
    display.line(_load_line(result))
    result.sensitivity = list(measure(served, prompt))
    display.sensitivity(result.sensitivity)
    if options.store is not None:
        served.cache.flush()
        served.ledger.save()
        display.line(_store_line(options.store, served.cache.stats()))
        result.seconds = time.perf_counter() - started
        return result
    provocations = Provocations(served, prompt)
    with display.section(f"{name}: the same prompt again, with faults provoked"):
        for row in provocations.run():
            result.provocations.append(row)
            display.row(row)
    result.seconds = time.perf_counter() - started
    return result


def _load_line(result: ModelResult) -> str:
    """One line about the load: tokens asked, reused and lost, and what was evicted."""
    prompt = sum(row.prompt_tokens for row in result.turns)
    hashed = sum(row.hash_hit_tokens for row in result.turns)
    reused = sum(row.recoverable_tokens for row in result.turns)
    evicted = {kind: count for kind, count in result.stats["evictions"].items() if count}
    text = ", ".join(f"{count} {kind}" for kind, count in evicted.items()) or "nothing"
    return f"{prompt} prompt tokens, {hashed} hash hits, {reused} recovered and not computed again; evicted objects: {text}"


def _store_line(store: Path, stats: dict[str, Any]) -> str:
    """One line about the disk. Its faults, if there were any, by name."""
    disk = stats["tiers"]["disk"]
    fine = ("done", "already_there", "missing")
    faults = {name: n for counts in (disk["reads"], disk["writes"]) for name, n in counts.items() if n and name not in fine}
    text = ", ".join(f"{count} {name}" for name, count in faults.items()) or "no faults"
    return (
        f"{store}: {disk['bundles']} bundles of {disk['used_bytes'] / 2**20:.1f} MiB, {disk['writes']['done']} stored and "
        f"{disk['reads']['done']} restored in this run, {text}. Faults are provoked only without a store."
    )


def _summarise(results: list[ModelResult], seconds: float, display: Display) -> None:
    display.line("")
    for result in results:
        rows = [*result.turns, *result.provocations]
        bad = sum(not row.ok for row in rows) + sum(not item.ok for item in result.sensitivity)
        schedule = max(row.difference_schedule for row in rows)
        cold = max(row.difference_cold for row in rows)
        first = [sum(getattr(row, name) for row in rows) for name in ("cold_first_token_ms", "warm_first_token_ms")]
        verdict = "all outputs as promised" if not bad else f"{bad} NOT AS PROMISED"
        display.line(
            f"{result.model}: {len(rows)} answers, {verdict}; largest logit difference {schedule:.1e} (same schedule), "
            f"{cold:.1e} (cold); first token {first[0]:.0f} ms cold, {first[1]:.0f} ms warm in all; {result.seconds:.0f} s",
            "bold red" if bad else "bold",
        )
    display.line(f"{seconds:.0f} s in all")


def _write(options: DemoOptions, models: list[dict[str, Any]], ok: bool, display: Display) -> None:
    if options.json_path is None:
        return
    document = {
        "hetkv": hetkv.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "turns": options.turns,
        "seed": options.seed,
        "attach": options.attach,
        "ok": ok,
        "models": models,
    }
    options.json_path.write_text(json.dumps(document, indent=1) + "\n")
    display.line(f"Written: {options.json_path}")
