"""Real weights rounded to int8: nearly the logits of float32, and served with and without speculation."""

from contextlib import closing
from typing import Any

import pytest
import torch
from support.int8_linears import with_int8_linears
from support.paged_rows import Paged
from support.solo import Solo
from torch import Tensor

from overlap_spec.config import ModelFiles
from overlap_spec.messages import SamplingParams
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.loading.loader import load_target
from overlap_spec.worker import build

CPU = torch.device("cpu")
NUM_PROMPTS, NUM_TOKENS = 2, 16
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, seed=0)


def logits_of(weights: LoadedTarget, tokens: list[int]) -> Tensor:
    paged = Paged(num_requests=1, pages_each=-(-len(tokens) // 4))
    cache = KVCache.allocate(weights.kv_shape, paged.num_pages, paged.page_size, torch.float32, CPU)
    target = weights.attach(cache, len(tokens))
    return target.logits(target.forward(torch.tensor(tokens), paged.rows([len(tokens)])).hidden).compute()


@pytest.mark.full
@torch.inference_mode()
def test_it_reads_its_own_answers_as_float32_does(files: ModelFiles, rows: list[dict[str, Any]]) -> None:
    """Given the tokens before it, nearly every token of float32's answers is int8's best too."""
    dense = load_target(files, torch.float32, CPU)
    int8 = with_int8_linears(dense)
    assert int8.num_bytes < 0.5 * dense.num_bytes, "the embedding stays, and a quarter of the rest"
    agreed, errors = [], []
    for row in rows[:4]:
        prompt, answer = row["prompt_ids"], row["tokens"]
        found, exact = (logits_of(weights, prompt + answer)[len(prompt) - 1 : -1] for weights in (int8, dense))
        agreed.append((found.argmax(1) == torch.tensor(answer)).float().mean())
        errors.append((found - exact).norm() / exact.norm())
    assert torch.stack(agreed).mean() > 0.9
    assert 1e-4 < torch.stack(errors).mean() < 0.05


@pytest.mark.full
def test_it_is_served_and_speculation_changes_nothing(
    files: ModelFiles, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_target", lambda *given: with_int8_linears(load_target(*given)))
    chain = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    runs = []
    for flags in ({"speculative_algorithm": "NONE"}, {"speculative_algorithm": "EAGLE3", **chain}):
        with closing(Solo(files, device="cpu", **flags)) as solo:
            runs.append([solo.answer(row["prompt_ids"], GREEDY) for row in rows[:NUM_PROMPTS]])
    plain, eagle3 = runs
    assert [answer.tokens for answer in eagle3] == [answer.tokens for answer in plain]
    assert sum(len(answer.runs) for answer in eagle3) < sum(len(answer.runs) for answer in plain)
