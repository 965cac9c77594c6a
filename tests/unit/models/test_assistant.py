"""Gemma 4's assistant: its logits against a loop written out, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged_rows import Paged
from support.reference.assistant import ReferenceAssistant
from support.tiny.assistant import load_tiny_assistant, tiny_assistant
from support.tiny.drawn import random_checkpoint
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_target, write_checkpoint
from support.transformers_model import keep_float64, reference_model
from torch import Tensor

from overlap_spec.config.speculation import DraftKind, can_only_draft, draft_kind
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import refuse_other_kind
from overlap_spec.models.drafts.assistant import load_assistant
from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.loading.sources import DraftSource

F64 = torch.float64
TOLERANCE = {F64: 1e-9, torch.float32: 1e-4}
CASES = {"31b": ("gemma 4", 0), "e": ("gemma 4 e", 16), "a4b": ("gemma 4 moe", 0)}
START, STEPS, GUESSES = 4, 8, 3  # committed tokens of the first step; they pass the window of 6


def at_last(paged: Paged, length: int) -> RowBatch:
    """The row of the last token that is written."""
    paged.lengths = [length - 1]
    return paged.rows([1], commit=False)


def drafted(
    target: TinyCheckpoint, draft: TinyCheckpoint, dtype: torch.dtype, start: int = START, num_steps: int = STEPS
) -> list[list[Tensor]]:
    """The logits of three guesses after each of some lengths of a text."""
    weights = load_tiny_target(target, dtype)
    assistant, paged = load_tiny_assistant(draft, weights), Paged(num_requests=1)
    cache = KVCache.allocate(weights.kv_shape, paged.num_pages, paged.page_size, dtype, CPU)
    model, head = weights.attach(cache, 64), assistant.attach(cache, 64)
    found = []
    for length in range(start, start + num_steps):
        paged.lengths = [0] if length == start else [length - 1]
        part = TEXT[paged.lengths[0] : length]
        hidden, token, steps = model.forward(part, paged.rows([len(part)])).hidden[-1:], TEXT[length : length + 1], []
        for _ in range(GUESSES):
            output = head.forward(token, hidden, at_last(paged, length))
            logits = head.logits(output)
            steps.append(logits.compute()[0])
            token, hidden = logits.argmax(), head.next_hidden(output)
            assert int(token) == int(steps[-1].argmax())
        found.append(steps)
    return found


TEXT = torch.randint(128, (START + STEPS + 1,), generator=torch.Generator().manual_seed(5))


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_loop(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)
    family, centroids = CASES[case]
    target = random_checkpoint(family)
    draft = tiny_assistant(5, target, agree=False, centroids=centroids, hidden_size=20)
    loop = ReferenceAssistant(draft.tensors, draft.config, reference_model(target, F64))
    for length, found in enumerate(drafted(target, draft, dtype), start=START):
        tokens = TEXT[:length].tolist()
        with torch.no_grad():
            _, hidden, kept = loop.read(tokens)
            wanted = loop.draft(tokens, int(TEXT[length]), hidden[-1], kept, GUESSES)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.slow
def test_every_tensor_counts() -> None:
    target = random_checkpoint("gemma 4 e")
    draft = tiny_assistant(5, target, agree=False, centroids=16)

    def logits(tensors: dict[str, Tensor]) -> Tensor:
        return drafted(target, TinyCheckpoint(draft.config, tensors), F64, start=12, num_steps=1)[0][1]

    whole = logits(draft.tensors)
    for name, tensor in draft.tensors.items():
        if "token_ordering" in name:
            continue
        assert not torch.equal(logits(draft.tensors | {name: torch.zeros_like(tensor)}), whole), name
    other = draft.tensors["masked_embedding.token_ordering"].flip(0)
    assert not torch.equal(logits(draft.tensors | {"masked_embedding.token_ordering": other}), whole)


def test_the_targets_keys_and_values_are_read_and_not_written() -> None:
    target = load_tiny_target(random_checkpoint("gemma 4 e"))
    assistant, paged = load_tiny_assistant(tiny_assistant(5, random_checkpoint("gemma 4 e")), target), Paged(1)
    cache = KVCache.allocate(target.kv_shape, paged.num_pages, paged.page_size, F64, CPU)
    hidden = target.attach(cache, 64).forward(TEXT, paged.rows([len(TEXT)])).hidden[-1:]
    before = [part.clone() for part in cache.stacked]
    assistant.attach(cache, 64).forward(TEXT[:1], hidden, at_last(paged, len(TEXT)))
    assert all(map(torch.equal, cache.stacked, before))
    assert assistant.profile.kv_shape.num_layers == 0 and assistant.sources == (2, 2, 3)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "hidden size": ({"backbone_hidden_size": 48}, {}, r"backbone_hidden_size: found 48, expected the target's 32"),
    "vocabulary": (
        {},
        {"vocab_size": 96},
        r"vocab_size: found 96, expected the target's 128",
    ),
    "heads": ({}, {"num_key_value_heads": 4}, r"layer 0, 'sliding_attention': num_kv_heads: found 4, expected 2"),
    "columns": ({}, {"global_head_dim": 32}, r"layer 2, 'full_attention': head_dim: found 32, expected 24, as the"),
    "window": ({}, {"sliding_window": 7}, r"layer 0, 'sliding_attention': window: found 7, expected 6"),
    "centroids": (
        {"use_ordered_embeddings": True, "num_centroids": 7},
        {},
        r"num_centroids: found 7, expected a divisor of vocab_size 128, and at least",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_assistant_of_another_target_is_refused(case: str) -> None:
    whole, text, refused = BAD[case]
    target = random_checkpoint("gemma 4 e")
    draft = tiny_assistant(5, target)
    config = draft.config | whole | {"text_config": draft.config["text_config"] | text}
    with pytest.raises(CheckpointError, match=refused):
        load_tiny_assistant(TinyCheckpoint(config, draft.tensors), load_tiny_target(target))


def test_a_target_that_is_no_gemma_4_is_refused() -> None:
    draft = tiny_assistant(5, random_checkpoint("gemma 4 e"))
    with pytest.raises(CheckpointError, match=r"the assistant is another target's: the target is no Gemma 4"):
        load_tiny_assistant(draft, load_tiny_target(tiny_target(1)))


def test_tokens_that_are_not_each_once_are_refused() -> None:
    target = random_checkpoint("gemma 4 e")
    draft = tiny_assistant(5, target, centroids=16)
    draft.tensors["masked_embedding.token_ordering"][3] = 5
    with pytest.raises(CheckpointError, match=r"token_ordering: expected each of 128 token ids once, found others"):
        load_tiny_assistant(draft, load_tiny_target(target))


def test_files_are_read_and_their_kind_is_known(tmp_path: Path) -> None:
    checkpoint = random_checkpoint("gemma 4")
    target = load_tiny_target(checkpoint)
    write_checkpoint(tmp_path, tiny_assistant(5, checkpoint, centroids=16))
    source = DraftSource(str(tmp_path), F64, CPU)
    found, expected = (
        load_assistant(source, target),
        load_tiny_assistant(tiny_assistant(5, checkpoint, centroids=16), target),
    )
    x = torch.randn(3, 32, dtype=F64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found.head.logits(x), expected.head.logits(x))
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny_assistant(5, checkpoint).tensors.items()}
    assert draft_kind(shapes) is DraftKind.ASSISTANT and can_only_draft(shapes)
    refuse_other_kind("NEXTN", "draft", shapes)
    with pytest.raises(CheckpointError, match=r"looks like an assistant .* use --speculative-algorithm NEXTN"):
        refuse_other_kind("EAGLE3", "draft", shapes)


def test_a_row_has_the_same_logits_beside_others() -> None:
    head = load_tiny_assistant(
        tiny_assistant(5, random_checkpoint("gemma 4"), centroids=16), load_tiny_target(random_checkpoint("gemma 4"))
    ).head
    x = torch.randn(8, 32, dtype=F64, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([head.logits(row[None]) for row in x])
    torch.testing.assert_close(head.logits(x), alone, atol=1e-12, rtol=0)


def test_other_families_have_no_assistant() -> None:
    assert "gemma 3" in TINY_FAMILIES
    with pytest.raises(CheckpointError, match="no Gemma 4"):
        load_tiny_assistant(
            tiny_assistant(5, random_checkpoint("gemma 4 e")), load_tiny_target(random_checkpoint("gemma 3"))
        )
