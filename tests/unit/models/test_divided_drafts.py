"""Drafts of a target that is divided among ranks, which read what ranks add up. EAGLE-3's layers are divided, too.

Of other drafts each rank has all. Embedding and head may be the target's, of which a rank has a part. Logits are
compared with those on one rank and with a written-out reference, and so are guesses and accept lengths: equal tokens
would show nothing of a draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from support.paged_rows import Paged
from support.reference import eagle, eagle3
from support.reference.mtp import DeepSeek, Mimo, ReferenceMtp
from support.ring import RingConfig, tiny_loaded
from support.speculated import Step, speculated
from support.threaded_ranks import on_ranks
from support.tiny.drawn import random_checkpoint
from support.tiny.eagle import load_tiny_eagle, tiny_eagle
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_draft, load_tiny_target, tiny_eagle3
from support.tiny.mtp import in_deepseek_layout, load_tiny_mtp, tiny_mtp, tiny_nextn
from torch import Tensor

from overlap_spec.models.interfaces import DraftHead, LoadedDraft, LoadedTarget
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.embedding import DividedEmbedding
from overlap_spec.models.layers.parallel import WHOLE, Rank

F64 = torch.float64
TOKENS = (torch.arange(17) * 37 + 5) % 128
DRAFTED = 4
MAPPED = torch.randperm(128, generator=torch.Generator().manual_seed(9))[:90]  # tokens that a draft may guess
Shared = tuple[Tensor, Tensor]  # the target's embedding and head
Made = Callable[[TinyCheckpoint], TinyCheckpoint]


@dataclass(frozen=True)
class Kind:
    """A kind of draft: its checkpoint for a target's, how it is loaded, and its formula written out."""

    family: str
    made: Made
    load: Callable[[TinyCheckpoint, LoadedTarget], LoadedDraft[DraftHead]]
    reference: Callable[[TinyCheckpoint, Shared], Any]


def eagle3_of(checkpoint: TinyCheckpoint, shared: Shared) -> Any:
    tensors, (embed, head) = checkpoint.tensors, shared
    if "lm_head.weight" not in tensors:
        tensors = tensors | {"lm_head.weight": head, "d2t": torch.zeros(len(head), dtype=torch.int64)}
    return eagle3.ReferenceHead(tensors, checkpoint.config, embed)


def mtp_of(layout: Mimo) -> Callable[[TinyCheckpoint, Shared], Any]:
    return lambda checkpoint, shared: ReferenceMtp(checkpoint.tensors, checkpoint.config, *shared, layout)


def latent_mtp_of(checkpoint: TinyCheckpoint, shared: Shared) -> Any:
    from support.reference.latent_mtp import ReferenceLatentMtp  # imports transformers

    return ReferenceLatentMtp(checkpoint.tensors, checkpoint.config, *shared)


def glm_mtp_of(checkpoint: TinyCheckpoint, shared: Shared) -> Any:
    from support.reference.glm_mtp import ReferenceGlmMtp  # imports transformers

    return ReferenceGlmMtp(checkpoint.tensors, checkpoint.config, *shared)


KINDS = {
    "EAGLE-3": Kind("llama", lambda target: tiny_eagle3(5, target, agree=False), load_tiny_draft, eagle3_of),
    "EAGLE-3 with the target's head": Kind(
        "llama", lambda target: tiny_eagle3(5, target, agree=False, draft_vocab=None), load_tiny_draft, eagle3_of
    ),
    "EAGLE with a token map": Kind(
        "llama",
        lambda target: tiny_eagle(5, target, agree=False),
        lambda checkpoint, target: load_tiny_eagle(checkpoint, target, MAPPED),
        lambda checkpoint, shared: eagle.ReferenceHead(checkpoint.tensors, checkpoint.config, *shared, MAPPED.tolist()),
    ),
    "MTP of MiMo": Kind("llama", lambda target: tiny_mtp(5, target, agree=False), load_tiny_mtp, mtp_of(Mimo())),
    "MTP in DeepSeek's layout": Kind(
        "llama",
        lambda target: in_deepseek_layout(tiny_mtp(5, target, agree=False)),
        load_tiny_mtp,
        mtp_of(DeepSeek()),
    ),
    "MTP of DeepSeek-V3": Kind(
        "deepseek v3", lambda target: tiny_nextn(5, target, agree=False), load_tiny_mtp, latent_mtp_of
    ),
    "MTP of GLM-4.5": Kind("glm 4.5", lambda target: tiny_nextn(5, target, agree=False), load_tiny_mtp, glm_mtp_of),
}
QUICK = [(2, "EAGLE-3 with the target's head"), (4, "EAGLE with a token map"), (2, "MTP of MiMo")]
CASES = [(ranks, kind) for kind in KINDS for ranks in (2, 4)]
SIZES = {"vocab_size": 130}  # which 4 ranks fill up


def target_of(kind: Kind) -> TinyCheckpoint:
    return random_checkpoint(kind.family, **SIZES)


def drafted(kind: Kind, rank: Rank) -> tuple[Tensor, Tensor]:
    """Logits of a prompt's rows and of draft steps after it, and the features of the prompt's rows."""
    checkpoint, caches = target_of(kind), [Paged(num_requests=1) for _ in range(2)]
    target = load_tiny_target(checkpoint, rank=rank)
    draft = kind.load(kind.made(checkpoint), target)
    model = target.attach(cache_of(target.kv_shape, caches[0]), 64, draft.profile.aux_layers)
    output = model.forward(TOKENS, caches[0].rows([len(TOKENS)]))
    head = draft.attach(cache_of(draft.profile.kv_shape, caches[1]), 64)
    features = head.fuse(output)
    rows = head.forward(TOKENS.roll(-1), features, caches[1].rows([len(TOKENS)]))
    logits, row = [head.logits(rows).compute()], head.enter(rows.values[-1:])
    for _ in range(DRAFTED):
        guess = head.logits(row).argmax(head.target_ids)
        row = head.forward(guess, head.next_features(row), caches[1].rows([1]))
        logits.append(head.logits(row).compute())
    return torch.cat(logits), features


def cache_of(shape: Any, paged: Paged) -> KVCache:
    return KVCache.allocate(shape, paged.num_pages, paged.page_size, F64, CPU)


def written_out(kind: Kind, features: Tensor) -> Tensor:
    """The same logits by the reference, from a prompt's features on."""
    target = target_of(kind)
    shared = target.tensors["model.embed_tokens.weight"], target.tensors["lm_head.weight"]
    head = kind.reference(kind.made(target), shared)
    rows = head.forward(TOKENS.roll(-1).tolist(), features, 0)
    logits, row = [head.logits(each) for each in rows], rows[-1]
    for step in range(DRAFTED):
        row = head.forward([head.guess(row)], row[None], len(TOKENS) + step)[0]
        logits.append(head.logits(row))
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("ranks", "kind"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_logits_are_one_ranks_and_the_formulas(ranks: int, kind: str) -> None:
    (first, features), *others = on_ranks(ranks, lambda rank: drafted(KINDS[kind], rank))
    assert all(torch.equal(logits, first) and torch.equal(each, features) for logits, each in others)
    whole, of_whole = drafted(KINDS[kind], WHOLE)
    torch.testing.assert_close(features, of_whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(first, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(first, written_out(KINDS[kind], of_whole), atol=1e-9, rtol=0)


@pytest.mark.parametrize(("ranks", "part"), [(1, 1), (2, 2), (3, 1)])
def test_each_rank_has_its_part_of_eagle3s_layers(ranks: int, part: int) -> None:
    """Three ranks do not divide the head's heads, so each has all of it."""
    checkpoint = target_of(KINDS["EAGLE-3"])
    target = load_tiny_target(checkpoint)
    shared = DividedEmbedding(target.embedding.weight, num_tokens=target.vocab_size, rank=Rank(ranks - 1, ranks))
    found, whole = (
        load_tiny_draft(tiny_eagle3(5, checkpoint), each).layers[0]
        for each in (replace(target, embedding=shared), target)
    )
    for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"):
        linear = attrgetter(name)
        assert linear(found).num_bytes * part == linear(whole).num_bytes, name


METHODS = [
    *(("llama", method, 1) for method in ("EAGLE3", "NEXTN", "EAGLE with a token map", "STANDALONE", "NGRAM")),
    *(("llama", method, 2) for method in ("EAGLE3", "NEXTN", "STANDALONE")),
    *(("qwen3 moe", method, 1) for method in ("EAGLE3", "NEXTN")),
    *(("deepseek v3", method, 1) for method in ("EAGLE3", "NEXTN in DeepSeek's layout")),
]


@pytest.mark.full_but_every(22)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("family", "method", "topk"), METHODS)
def test_guesses_and_accept_lengths_are_one_ranks(family: str, method: str, topk: int, ranks: int) -> None:
    """Step by step, of the same request."""
    config = RingConfig(method=method, family=family, num_steps=3, topk=topk, chunk_tokens=64)

    def steps(rank: Rank) -> list[Step]:
        return speculated(tiny_loaded(10, 3, method=method, family=family, topk=topk, rank=rank), config, rank)

    whole = steps(WHOLE)
    assert len({step.accept_len for step in whole}) > 1, "some guesses are accepted and some are not"
    assert all(found == whole for found in on_ranks(ranks, steps))
