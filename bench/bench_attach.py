"""Decoding of an attached DeepSeek-V4 beside transformers' own cache and eager code, both with the same long history.

    python bench/bench_attach.py [--tokens 32768] [--heads 64] [--steps 12] [--threads 1] [--json FILE]

Three layers with the real geometry of attention and index; projections and experts, which are the same code in both, are narrow.
Random weights, float32. Both compute the prompt first, in chunks, and then decode the same tokens in turns. The logits of every
step are compared: at this length near-ties of the index send some tokens of the prompt another way, as they do between two
ways to cut the prompt in eager code alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import transformers
from provenance import provenance
from torch import Tensor, nn

import hetkv
from hetkv.integrations.transformers.attach import attach
from hetkv.tools.demo.models import draw_weights, tiny_config

CHUNK = 512


def build(tokens: int, heads: int) -> nn.Module:
    """A layer of each kind of attention, so narrow otherwise that attention is what decoding costs."""
    config = tiny_config(
        "deepseek_v4",
        512,
        hidden_size=64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "hash_moe", "moe"],
        num_attention_heads=heads,
        head_dim=512,
        partial_rotary_factor=0.125,
        q_lora_rank=16,
        o_groups=8,
        o_lora_rank=16,
        index_n_heads=heads,
        index_head_dim=128,
        index_topk=512,
        max_position_embeddings=tokens + 1024,
    )
    model = transformers.DeepseekV4ForCausalLM(config)
    draw_weights(model, 1)
    model.set_attn_implementation("eager")
    return model.eval()


class AttentionClock:
    """Seconds that a model spends in its attention modules: compressor and index included, as well as projections."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self._begin = 0.0
        for name, module in model.named_modules():
            if name.endswith("self_attn"):
                module.register_forward_pre_hook(self._start)
                module.register_forward_hook(self._stop)

    def _start(self, *_: object) -> None:
        self._begin = time.perf_counter()

    def _stop(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begin

    def lap(self) -> float:
        """Seconds since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken


def timed_step(run: object, *args: object) -> tuple[float, Tensor]:
    begin = time.perf_counter()
    logits: Tensor = run(*args)  # type: ignore[operator]
    return time.perf_counter() - begin, logits


def main() -> None:
    """Prints times and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument(
        "--heads", type=int, default=64, help="of attention and of the index; fewer, and the eager prompt takes less"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the result to FILE (results/attach.json is in RESULTS.md)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load = [round(value, 2) for value in os.getloadavg()]
    prompt = torch.randint(0, 512, (args.tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    answer = torch.randint(0, 512, (args.steps,), generator=torch.Generator().manual_seed(3)).tolist()

    stock = build(args.tokens, args.heads)
    eager_clock = AttentionClock(stock)
    history = transformers.DynamicCache(config=stock.config)

    def eager(tokens: list[int], begin: int) -> Tensor:
        with torch.inference_mode():
            out = stock(
                torch.tensor([tokens]),
                past_key_values=history,
                position_ids=torch.arange(begin, begin + len(tokens))[None],
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = out.logits[0, -1]
        return logits

    begin = time.perf_counter()
    for at in range(0, args.tokens, CHUNK):
        eager(prompt[at : at + CHUNK], at)
    eager_prefill = time.perf_counter() - begin
    print(f"transformers eager: prefill of {args.tokens} tokens {eager_prefill:.1f} s", flush=True)

    model = build(args.tokens, args.heads)
    clock = AttentionClock(model)
    layout = hetkv.CacheLayout.from_config(model.config, block_size=64, dtype="float32")
    cache = hetkv.Cache(layout, capacity="3GiB")
    attached = attach(model, cache, max_tokens=CHUNK, max_sequence_tokens=args.tokens + 1024)
    times: dict[str, list[float]] = {"eager": [], "attached": [], "eager attention": [], "attached attention": []}
    differences: list[float] = []
    begin = time.perf_counter()
    with attached.open(prompt, max_new_tokens=args.steps + 1) as request:
        while chunk := request.next_chunk(CHUNK):
            attached.run([request], [chunk])
        attached_prefill = time.perf_counter() - begin
        print(f"attached: prefill {attached_prefill:.1f} s, {eager_prefill / attached_prefill:.1f} x", flush=True)
        clock.lap(), eager_clock.lap()
        for step, token in enumerate(answer):
            request.append([token])
            taken, mine = timed_step(attached.run, [request], [1])
            times["attached"].append(taken)
            taken, theirs = timed_step(eager, [token], args.tokens + step)
            times["eager"].append(taken)
            times["attached attention"].append(clock.lap())
            times["eager attention"].append(eager_clock.lap())
            differences.append(float((mine.reshape(-1) - theirs).abs().max()))
    decode = {name: 1e3 * statistics.median(taken[1:]) for name, taken in times.items()}
    for what in ("", " attention"):
        ours, others = decode[f"attached{what}"], decode[f"eager{what}"]
        print(f"decode at {args.tokens} tokens{what}: attached {ours:.2f} ms, eager {others:.2f} ms, {others / ours:.1f} x")
    print(f"logits differ by {max(differences):.1e} at most")
    if args.json is not None:
        facts = {
            "tokens": args.tokens, "heads": args.heads, "threads": args.threads,
            "torch": torch.__version__, "transformers": transformers.__version__,
            "decode_ms": decode, "prefill_s": {"attached": attached_prefill, "eager": eager_prefill},
            "logits_differ": max(differences),
        }  # fmt: skip
        args.json.write_text(json.dumps({**provenance(), "load_before": load, **facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
