"""The MTP layer of a model whose layers have experts: against its formula written out, and tensor by tensor."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.paged_rows import Paged
from support.reference.glm_mtp import ReferenceGlmMtp
from support.reference.latent_mtp import ReferenceLatentMtp
from support.reference.qwen3_next_mtp import ReferenceQwen3NextMtp
from support.tiny.families import HYBRIDS, TINY_FAMILIES
from support.tiny.layouts import fused_experts
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_target, write_checkpoint
from support.tiny.mtp import load_tiny_mtp, tiny_nextn, tiny_qwen3_next
from torch import Tensor

from overlap_spec.models.drafts.mtp import MtpHead
from overlap_spec.models.interfaces import DraftHead, LoadedDraft
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.loading.loader import load_mtp
from overlap_spec.models.loading.sources import DraftSource

LATENTS = KVShape(1, 1, 40, 24)  # one row of latents a token
FAMILIES = {
    "deepseek v3": (ReferenceLatentMtp, LATENTS),
    "glm 4.7 flash": (ReferenceLatentMtp, LATENTS),
    "qwen3 next": (ReferenceQwen3NextMtp, KVShape(1, 2, 16)),
    "qwen3.5": (ReferenceQwen3NextMtp, KVShape(1, 2, 16)),
    "qwen3.5 moe": (ReferenceQwen3NextMtp, KVShape(1, 2, 16)),
    "glm 4.5": (ReferenceGlmMtp, KVShape(1, 2, 16)),
}
ROWS, DRAFTED = 24, 16
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def checkpoint_of(family: str) -> TinyCheckpoint:
    made = tiny_qwen3_next if family in HYBRIDS else tiny_nextn
    return made(5, tiny_target(3, **TINY_FAMILIES[family]), agree=False)


def attached(checkpoint: TinyCheckpoint, dtype: torch.dtype, paged: Paged) -> MtpHead:
    return attach(load_tiny_mtp(checkpoint, load_tiny_target(checkpoint, dtype)), dtype, paged)


def attach(weights: LoadedDraft[DraftHead], dtype: torch.dtype, paged: Paged) -> MtpHead:
    cache = KVCache.allocate(weights.profile.kv_shape, paged.num_pages, paged.page_size, dtype, CPU)
    head = weights.attach(cache, 64)
    assert isinstance(head, MtpHead)
    return head


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(128, (ROWS,), generator=random)
    return tokens, torch.randn(ROWS, 32, generator=random, dtype=torch.float64).to(dtype)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_loop(family: str, dtype: torch.dtype) -> None:
    """Of a prompt longer than yarn's original length in two chunks, then of 16 draft steps."""
    checkpoint, paged = checkpoint_of(family), Paged(num_requests=1)
    tensors = checkpoint.tensors
    embed, own_head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    loop = FAMILIES[family][0](tensors, checkpoint.config, embed, own_head)
    head, (tokens, features) = attached(checkpoint, dtype, paged), inputs(dtype)
    parts = (slice(5), slice(5, ROWS))
    outputs = [head.forward(tokens[part], features[part], paged.rows([len(tokens[part])])) for part in parts]
    found = torch.cat([head.logits(output).compute() for output in outputs])
    wanted = loop.forward(tokens.tolist(), features.double(), 0)
    torch.testing.assert_close(found.double(), wanted @ loop.head.T, atol=TOLERANCE[dtype], rtol=0)
    drafted, row = head.enter(outputs[-1].values[-1:]), wanted[-1]
    for step in range(DRAFTED):
        guess = head.logits(drafted).argmax(head.target_ids)
        assert guess.tolist() == [loop.guess(row)]
        drafted = head.forward(guess, head.next_features(drafted), paged.rows([1]))
        row = loop.forward(guess.tolist(), row[None], ROWS + step)[0]
        logits = head.logits(drafted).compute()[0].double()
        torch.testing.assert_close(logits, loop.logits(row), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_layer_counts(family: str) -> None:
    checkpoint, (tokens, features) = checkpoint_of(family), inputs(torch.float64)

    def logits(tensors: dict[str, Tensor]) -> Tensor:
        paged = Paged(num_requests=1)
        head = attached(TinyCheckpoint(checkpoint.config, tensors), torch.float64, paged)
        return head.logits(head.forward(tokens, features, paged.rows([ROWS]))).compute()

    whole, shared = logits(checkpoint.tensors), ("embed_tokens.weight", "shared_head.head.weight")
    own = ("model.layers.2.", "mtp.")
    layer = [name for name in checkpoint.tensors if name.startswith(own) and not name.endswith(shared)]
    without = {name: checkpoint.tensors | {name: torch.zeros_like(checkpoint.tensors[name])} for name in layer}
    assert len(layer) > (14 if family == "qwen3.5" else 30)
    assert not [name for name, left in without.items() if torch.equal(logits(left), whole)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_absorbed_is_what_a_forward_writes(family: str) -> None:
    checkpoint, (tokens, features) = checkpoint_of(family), inputs(torch.float64)
    caches = []
    for alone in (False, True):
        paged = Paged(num_requests=1)
        head, rows = attached(checkpoint, torch.float64, paged), paged.rows([ROWS])
        head.absorb(tokens, features, rows) if alone else head.forward(tokens, features, rows)
        caches.append(head._attention.cache.stacked[0])
    torch.testing.assert_close(caches[1], caches[0], atol=1e-12, rtol=0)
    assert caches[0].any()


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_is_found_in_the_files_of_its_target(family: str, fused: bool, tmp_path: Path) -> None:
    published = checkpoint_of(family)
    checkpoint = replace(published, tensors=fused_experts(published.tensors)) if fused else published
    write_checkpoint(tmp_path, checkpoint)
    target = load_tiny_target(checkpoint)
    assert target.num_layers == 2
    found, expected = load_mtp(DraftSource(str(tmp_path), torch.float64, CPU), target), load_tiny_mtp(published, target)
    assert found.profile.num_bytes == expected.num_bytes
    assert found.profile.kv_shape == FAMILIES[family][1]
    tokens, features = inputs(torch.float64)
    outputs = [
        attach(head, torch.float64, Paged(1)).forward(tokens, features, Paged(1).rows([ROWS])).values
        for head in (found, expected)
    ]
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=0)
