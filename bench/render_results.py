"""Writes bench/RESULTS.md from the JSON in bench/results. Nothing in RESULTS.md is typed by hand.

python bench/render_results.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from provenance import ROOT
from result_files import Json, Own, Rounds, load

LAYOUTS = ("full", "full+window", "v4")
# Column of the peers' tables: heading, case, tokens.
COMPARED = (
    ("warm 8k", "warm_admit", 8192),
    ("warm 32k", "warm_admit", 32768),
    ("warm 128k", "warm_admit", 131072),
    ("cold 32k", "cold_request", 32768),
    ("churn 32k", "churn", 32768),
    ("decode token", "decode_token", 32768),
)

INTRODUCTION = """# Results

Written by `bench/render_results.py` from the JSON in `bench/results`. Do not edit.

The machine is shared and its speed changes by the hour: compare figures of one section, not of two.
"""

PREFIX_NOTES = """### A prefix that is cached

`probe` hashes and searches. `warm` is a whole warm request: hash, search, pin, compare every token, fill the tables, reserve the
rest, and give it all back. `next turn` is the same where the turn before has hashed the conversation so far.
"""

REQUEST_NOTES = """### A request of 32k tokens

`cold` is the whole first request in steps of 8,192 tokens, `admission` and `publish` are parts of it, `churn` is the same in a
pool of two prompts, so that it evicts. `decode` is one token, block boundaries included; then with publication at each boundary.
A block is a block of any pool; a node is one entry of the index: `block` tokens with all that belongs to them. Token ids are
apart, 4 bytes each.
"""

THREAD_NOTES = """### Threads

One store, one prefix of 128k tokens, every thread asks for it. `cores` is the processor time that the threads got, over the
clock's: where it is below the number of threads (or of cores), other programs had the cores, the threads took turns, and
`scaling` says nothing about the allocator. `undisturbed` has only the repeats in which every thread had its core.
"""

PEER_NOTES = """What is compared: tokens in native form in, block table out, one thread.

- A warm request finds a prefix of which all is cached, pins it and lets it go. hetkv hashes it, compares every token, pins, fills
  its tables and reserves the rest in that time. vLLM's time has its hashing added, as its manager takes requests that are hashed
  already. SGLang needs no hash: its tree compares tokens; the conversion of the Python list is not counted.
- A cold request is the first sight of a prompt: hash or match, allocate, commit. hetkv, vLLM and TokenSpeed take steps of 8,192
  tokens, SGLang one. hetkv's and TokenSpeed's times have the end of the request in them.
- SGLang's cold time has a fixed part of about 0.7 ms in small torch calls, TokenSpeed's has its scheduler's plan, vLLM's the
  request object. TokenSpeed offers no bare allocator call: all of its figures are whole scheduler steps.
- Churn: every prompt is new and the pool holds two, so that each request evicts.
- vLLM's V4 groups have blocks of 256, 64, 8 and 4 tokens, and it hashes every 4; hetkv's V4 groups share one block size.
"""

BUSY_NOTE = """**The machine was busy.** Operations of milliseconds were interrupted by other programs more often than those of
microseconds, so the ratios flatter the faster system.
"""

TRACE_NOTES = """The arena has the bytes of {pool:,} blocks of history; windows and tails have to fit into it as well.
`hash hits` is the share of prompt tokens whose prefix is known, `recoverable` the share that a request can resume from, with
every window and tail in place. Peers report one rate. Their pools have {pool:,} blocks (TokenSpeed with a window twice as many,
vLLM's V4 groups eight times). SGLang's rate with a window is flattering: its driver gives the tree a window slot for every token
and releases none.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def duration(us: float | None) -> str:
    """Microseconds in the unit that reads best."""
    if us is None:
        return "-"
    if us < 1:
        return f"{us * 1e3:.1f} ns"
    return f"{us:.3g} us" if us < 1000 else f"{us / 1e3:.2f} ms"


def tokens_name(tokens: int) -> str:
    """32768 -> 32k."""
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}k"


def made_by(content: Json) -> str:
    """Command, commit, processor, time, load."""
    text = f"`{content['command']}` at commit `{content['commit']}`, {content['started']}, {content['cpus']} cores of "
    text += f"{content['cpu']}, {content['machine']}."
    if "load_before" in content:
        text += f" Load average before (1, 5, 15 minutes): {', '.join(map(str, content['load_before']))}."
    return text + "\n"


def targets(own: Own | None, rounds: Rounds | None) -> list[str]:
    """What was asked for, what was measured, whether it is met."""
    rows: list[list[str]] = []

    def beside(target: str, peer: str, ours: str, what: tuple[str, int], least: float) -> None:
        case, tokens = what
        ratio = rounds.ratio(peer, ours, case, 64, tokens) if rounds else None
        if rounds is None or ratio is None:
            rows.append([target, "-", "not measured"])
            return
        us, theirs = rounds.median(ours, case, 64, tokens), rounds.median(peer, case, 64, tokens)
        measured = f"{duration(us)} against {duration(theirs)} ({peer}): {ratio:.1f} times"
        rows.append([target, measured, "yes" if ratio >= least else "**no**"])

    core, manager, windowed = ("warm_admit", 32768), ("warm_admit", 131072), ("cold_request", 32768)
    beside("warm 32k, block 64: half the time of SGLang's Rust core", "SGLang Rust", "hetkv", core, 2)
    beside("warm 128k, block 64: 100 times faster than vLLM's manager", "vLLM", "hetkv", manager, 100)
    candidates = ("SGLang Rust +window", "TokenSpeed +window", "vLLM +window")
    times = {p: t for p in candidates if rounds and (t := rounds.median(p, "cold_request", 64, 32768)) is not None}
    best = min(times, key=lambda p: times[p], default="")
    beside("cold 32k, full + window, block 64: 5 times faster than the best peer", best, "hetkv +window", windowed, 5)
    if own is not None:
        decode = [us for layout in LAYOUTS for block in (64, 16) if (us := own.us("decode_token", layout, block)) is not None]
        worst = max(decode)
        rows.append(["decode, one token: under 0.1 us", f"{duration(worst)} at most", "yes" if worst < 0.1 else "**no**"])
        meta = max((r["bytes_per_block"], r["layout"], r["block"]) for r in own.rows if r["case"] == "metadata")
        measured = f"{meta[0]:.0f} B at most ({meta[1]}, block {meta[2]})"
        rows.append(["metadata: at most 128 B a block, token ids apart", measured, "yes" if meta[0] <= 128 else "**no**"])
        rows.append(["lookups on two threads: 1.8 times as many", *two_threads(own)])
    return ["## Targets\n", *table(["target", "measured", "met"], rows)]


def two_threads(own: Own) -> tuple[str, str]:
    """Measured and met, of the target for lookups. Threads that took turns on one core prove nothing either way."""
    pairs = [row for block in (64, 16) if (row := own.row("threads_probe", "full", block, threads=2)) is not None]
    for row in pairs:
        if "undisturbed_scaling" in row:
            scaling = row["undisturbed_scaling"]
            repeats = (
                f"block {row['block']}; {row['undisturbed_repeats']:.0f} of {row['repeats']} repeats, those with both cores free"
            )
            return f"{scaling:.2f} times ({repeats})", "yes" if scaling >= 1.8 else "**no**"
    got = max((row["cores"] for row in pairs), default=0)
    return f"other programs left the two threads {got:.2f} cores", "not measured"


def own_section(own: Own) -> list[str]:
    """hetkv alone."""
    blocks = sorted({row["block"] for row in own.rows if row["case"] == "probe"}, reverse=True)
    prefixes = sorted({row["tokens"] for row in own.rows if row["case"] == "probe"})
    kinds = [(block, layout) for block in blocks for layout in LAYOUTS]
    rows = []
    for block, layout in kinds:
        for tokens in prefixes:
            warm = own.row("warm_admit", layout, block, tokens)
            if warm is None:
                continue
            cases = ("probe", "warm_admit", "warm_admit_conversation")
            times = [duration(own.us(case, layout, block, tokens)) for case in cases]
            rows.append([layout, str(block), tokens_name(tokens), *times, f"{warm['ns_per_block']:.0f} ns"])
    lines = ["## hetkv alone\n", made_by(own.content), PREFIX_NOTES]
    lines += table(["layout", "block", "prefix", "probe", "warm", "next turn", "warm, a block"], rows)

    rows = []
    for block, layout in kinds:
        meta = own.row("metadata", layout, block)
        if meta is None:
            continue
        parts = ("cold_request", "cold_admit", "publish", "churn", "decode_token", "decode_token_and_publish")
        times = [duration(own.us(case, layout, block)) for case in parts]
        rows.append([layout, str(block), *times, f"{meta['bytes_per_block']:.0f} B", f"{meta['bytes_per_node']:.0f} B"])
    head = [
        "layout",
        "block",
        "cold",
        "admission",
        "publish",
        "churn",
        "decode",
        "with publication",
        "metadata a block",
        "a node",
    ]
    lines += [REQUEST_NOTES, *table(head, rows)]

    rows = []
    for row in own.rows:
        if not row["case"].startswith(("reserve", "pin", "lookup", "hash")):
            continue
        per_block = f"{row['ns_per_block']:.1f} ns" if "ns_per_block" in row else ""
        length = f" {tokens_name(row['tokens'])}" if row["tokens"] else ""
        time = duration(row["median_ns"] / 1e3)
        rows.append([row["case"] + length, row["layout"], str(row["block"]), time, per_block])
    lines += ["### Parts\n", *table(["operation", "layout", "block", "time", "a block"], rows)]

    rows = []
    for row in own.rows:
        if row["case"].startswith("threads_"):
            name = row["case"].removeprefix("threads_")
            clean = (
                f"{row['undisturbed_scaling']:.2f} ({row['undisturbed_repeats']:.0f})" if "undisturbed_scaling" in row else "none"
            )
            numbers = [f"{row['operations_per_second']:,.0f}", f"{row['cores']:.2f}", f"{row['scaling']:.2f}", clean]
            rows.append([name, str(row["block"]), str(row["threads"]), *numbers])
    head = ["operation", "block", "threads", "a second", "cores", "scaling", "undisturbed (repeats)"]
    return [*lines, THREAD_NOTES, *table(head, rows)]


def own_counterpart(system: str) -> str:
    """Which of hetkv's layouts a peer's figures are held against."""
    for ending in (" +window", " V4 groups"):
        if system.endswith(ending):
            return "hetkv" + ending
    return "hetkv"


def peer_section(content: Json, rounds: Rounds) -> list[str]:
    """hetkv and its peers in turns."""
    starts = ", ".join(str(one["load_before"][0]) for one in content["rounds"])
    lines = ["## Beside peers\n", made_by(content)]
    lines += [f"{len(content['rounds'])} rounds, load average at their starts: {starts}. Medians over rounds.\n"]
    if max(one["load_before"][0] for one in content["rounds"]) > content["cpus"]:
        lines += [BUSY_NOTE]
    lines += [PEER_NOTES]
    for block in rounds.blocks():
        times, ratios = [], []
        for system in rounds.systems(block):
            times.append([system, *(duration(rounds.median(system, case, block, tokens)) for _, case, tokens in COMPARED)])
            if system.startswith("hetkv"):
                continue
            own = own_counterpart(system)
            each = [rounds.ratio(system, own, case, block, tokens) for _, case, tokens in COMPARED]
            ratios.append([f"{system} / {own}", *("-" if ratio is None else f"{ratio:.1f}" for ratio in each)])
        head = [heading for heading, _, _ in COMPARED]
        lines += [f"### Block {block}\n", *table(["system", *head], times)]
        lines += ["How many times longer the peer takes, median of the ratios inside each round:\n", *table(["", *head], ratios)]
    return lines


def trace_section(content: Json, peers: Rounds) -> list[str]:
    """Requests a second and hit rates; `peers` may have no rounds."""
    lines = ["## Request traces\n", made_by(content), TRACE_NOTES.format(pool=content["pool_blocks"])]
    for trace, block in dict.fromkeys((row["trace"], row["block"]) for row in content["results"]):
        mine = [row for row in content["results"] if (row["trace"], row["block"]) == (trace, block)]
        rows = []
        for row in mine:
            retention = "-" if row["layout"] == "full" else row["case"].split(" ")[-1]
            numbers = [f"{row['operations_per_second']:,.0f}", f"{row['hash_hit_rate']:.4f}", f"{row['recoverable_rate']:.4f}"]
            rows.append([f"hetkv {row['layout']}", retention, *numbers])
        for system in peers.systems(block):
            rate, hits = peers.median(system, f"replay {trace}", block), peers.median(system, f"hit_rate {trace}", block)
            if rate is not None and hits is not None:
                rows.append([system, "", f"{rate:,.0f}", f"{hits:.4f}", ""])
        lines += [f"### {trace}: {mine[0]['requests']:.0f} requests, block {block}\n"]
        lines += table(["system", "retention", "requests/s", "hash hits", "recoverable"], rows)
    return lines


def ops_section(content: Json, title: str) -> list[str]:
    """The CPU ops, each beside its baseline."""
    rows = []
    for line in content["lines"]:
        rate = f"{line['amount'] / line['microseconds'] / 1e3:.1f} {line['unit']}"
        rows.append([line["case"], f"{line['microseconds']:.0f} us", rate, f"{line['ratio']:.2f} x {line['baseline']}"])
    return [
        f"## {title}",
        "",
        f"{made_by(content).rstrip()} Level {content['level']}, {content['threads']} thread(s), torch {content['torch']}.",
        "",
        "Medians; an op and its baseline take turns. The ratio is the baseline's time over the op's: above 1, the op is faster.",
        "",
        *table(["case", "time", "rate", "beside"], rows),
        "",
    ]


def attach_section(content: Json) -> list[str]:
    """An attached model beside eager code."""
    decode, prefill = content["decode_ms"], content["prefill_s"]

    def row(what: str, unit: str, ours: float, theirs: float) -> list[str]:
        return [what, f"{ours:.1f} {unit}", f"{theirs:.1f} {unit}", f"{theirs / ours:.1f} x"]

    rows = [
        row("one token", "ms", decode["attached"], decode["eager"]),
        row("of that, attention modules", "ms", decode["attached attention"], decode["eager attention"]),
        row("prompt", "s", prefill["attached"], prefill["eager"]),
    ]
    return [
        "## An attached model",
        "",
        f"{made_by(content).rstrip()} {content['threads']} thread(s), torch {content['torch']}, transformers "
        f"{content['transformers']}.",
        "",
        f"DeepSeek-V4, three layers, {content['heads']} heads of 512 and of 128 in the index, float32, {content['tokens']:,} "
        f"tokens of history. Projections, experts and head are the same code in both. Logits differ by "
        f"{content['logits_differ']:.1e} at most: near-ties of the index send some tokens of the prompt another way, as they do "
        "between two ways to cut the prompt in eager code alone.",
        "",
        *table(["", "attached", "transformers eager", "ratio"], rows),
        "",
    ]


def disk_section(content: Json) -> list[str]:
    """The disk tier beside plain transfers."""
    median, gib = content["median"], 2**30
    rows = [
        [side, f"{median[side] / gib:.2f} GiB/s", f"{median[plain] / gib:.2f} GiB/s", f"{median[f'{side} ratio']:.2f}"]
        for side, plain in (("store", "plain write"), ("restore", "plain read"))
    ]
    opened = ", ".join(f"{item['bundles']:,} bundles in {item['seconds']:.2f} s" for item in content["opening"])
    return [
        "## The disk tier",
        "",
        made_by(content),
        f"A prefix of {content['tokens']:,} tokens of DeepSeek-V4-Flash's layout in bfloat16, block 128, "
        f"{len(content['rounds'])} rounds; plain: one file of the same bytes, 8 MiB at a time, one thread. "
        "Both sides past the page cache; loads and stores "
        f"of the tier verify every byte. The prefix is back in {median['restore seconds']:.3f} s. Opening: {opened}.",
        "",
        *table(["", "disk tier", "plain", "ratio"], rows),
        "",
    ]


def card_section(content: Json) -> list[str]:
    """The CUDA ops beside one card's own rates."""
    rows = []
    for line in content["lines"]:
        rate = f"{line['rate'] / 1e9:,.0f} GB/s" if line["bound"] == "copy" else f"{line['rate'] / 1e12:,.0f} TFLOP/s"
        aim = line["aim"]
        met = "" if aim is None else f"{aim:.0%}: {'yes' if line['share'] >= aim else '**no**'}"
        rows.append(
            [line["op"], line["case"], f"{line['microseconds']:.1f} us", rate, f"{line['share']:.0%} of {line['bound']}", met]
        )
    rates = content["rates"]
    lines = [
        f"## Ops on {content['card']}",
        "",
        made_by(content),
        f"torch {content['torch']}. The card's own rates in the same run: copies {rates['copy'] / 1e9:,.0f} GB/s (bytes read and "
        f"written), bf16 matmul {rates['matmul'] / 1e12:,.0f} TFLOP/s. Times are of calls inside a captured graph.",
        "",
        *table(["op", "case", "time", "rate", "share", "aim"], rows),
    ]
    if content["without_kernel"]:
        lines += [f"No CUDA kernel: {', '.join(content['without_kernel'])}.", ""]
    return lines


def render() -> str:
    """Writes bench/RESULTS.md; returns a line that says so."""
    own_json, compare_json, replay_json = load("hetkv"), load("compare"), load("replay")
    own = Own(own_json) if own_json else None
    rounds = Rounds(compare_json) if compare_json else None
    lines = [INTRODUCTION, *targets(own, rounds)]
    if own is not None:
        lines += own_section(own)
    if compare_json is not None and rounds is not None:
        lines += peer_section(compare_json, rounds)
    if replay_json is not None:
        lines += trace_section(replay_json, rounds or Rounds({"rounds": []}))
    for name, title in (("ops", "Ops on the CPU"), ("ops_vllm", "Ops on the CPU beside vLLM's")):
        ops_json = load(name)
        if ops_json is not None:
            lines += ops_section(ops_json, title)
    attach_json = load("attach")
    if attach_json is not None:
        lines += attach_section(attach_json)
    disk_json = load("disk")
    if disk_json is not None:
        lines += disk_section(disk_json)
    card_json = load("ops_cuda")
    if card_json is not None:
        lines += card_section(card_json)
    path = ROOT / "bench" / "RESULTS.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    return f"wrote {path.relative_to(ROOT)}"


if __name__ == "__main__":
    print(render())
