"""A whole decode step of each attached model as one graph: no break, no recompilation between steps, no copy of the arena."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import torch._dynamo.utils  # noqa: E402
from torch._inductor.utils import run_and_get_code  # noqa: E402

import hetkv  # noqa: E402
from hetkv.integrations.transformers.attach import AttachedModel, AttachedRequest, attach  # noqa: E402
from tiny_models import BUILDERS, VOCABULARY  # noqa: E402

NEW = 130
BOUND = 1e-4


def served(family: str) -> AttachedModel:
    model: nn.Module = BUILDERS[family]()
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]  # the stock one has shapes that depend on data
    layout = hetkv.CacheLayout.from_config(model.config, block_size=64, dtype="float32")
    return attach(model, hetkv.Cache(layout, "16MiB"), max_sequences=4, max_tokens=256, max_sequence_tokens=512)


def prefilled(attached: AttachedModel, prompts: list[list[int]]) -> list[AttachedRequest]:
    """Requests whose first token has been chosen."""
    requests = [attached.open(prompt, max_new_tokens=NEW) for prompt in prompts]
    for request in requests:
        while request.length < len(request.tokens):
            logits = attached.run([request], [request.next_chunk(256)])
        request.append([int(logits[0].argmax())])
    return requests


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
@pytest.mark.parametrize(
    ("family", "backend"),
    [("deepseek_v4", "inductor"), ("gpt_oss", "aot_eager"), ("gemma3", "inductor"), ("gemma3", "aot_eager")],
)
def test_decoding_in_one_graph(family: str, backend: str) -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    attached = served(family)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (150, 20, 64)]
    expected = attached.generate(prompts, NEW)
    attached.cache.clear()
    requests = prefilled(attached, prompts)
    graph = attached.compile_decode(4, backend=backend)
    steps = NEW - 1 if backend == "inductor" else 6
    seen: list[list[torch.Tensor]] = [[] for _ in requests]
    code: list[str] = []

    def step(active: list[AttachedRequest]) -> None:
        for request, row in zip(active, graph.run(active), strict=True):
            seen[requests.index(request)].append(row.clone())
            request.append([int(row.argmax())])

    if backend == "inductor":
        _, code = run_and_get_code(step, requests)
    else:
        step(requests)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(steps - 1):
        step(requests)
    step(requests[:2])  # a smaller batch is padded, not compiled anew
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not torch._dynamo.utils.counters["graph_break"]
    for reference, rows, request in zip(expected, seen, requests, strict=True):
        count = min(len(rows), NEW - 1)
        assert request.tokens[request.prompt_tokens :][: count + 1] == reference.tokens[: count + 1]
        for row, right in zip(rows, reference.logits[1:], strict=False):
            assert float((row - right).abs().max()) <= BOUND
    check_no_arena_copy(code, attached)
    for request in requests:
        request.close()
    attached.detach()


def check_no_arena_copy(code: list[str], attached: AttachedModel) -> None:
    """The generated code allocates nothing of the arena's size."""
    size = attached.cache.arena.numel()
    for text in code:
        assert "hetkv" in text
        assert f"empty_strided_cpu(({size}," not in text


def test_what_the_graph_refuses() -> None:
    attached = served("gemma3")
    graph = attached.compile_decode(1, backend="eager")
    requests: list[Any] = prefilled(attached, [[1, 2, 3], [4, 5]])
    with pytest.raises(ValueError, match="2 requests for a graph of 1"):
        graph.run(requests)
    with pytest.raises(ValueError, match="0 requests"):
        graph.run([])
    assert graph.run(requests[:1]).shape == (1, VOCABULARY)
    with pytest.raises(ValueError, match="known tokens"):  # nothing known is left to compute
        graph.run(requests[:1])
    for request in requests:
        request.close()
    attached.detach()
