"""The EAGLE-3 head against its formula written out, in every layout that checkpoints come in."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.models import (
    CPU,
    TinyCheckpoint,
    load_tiny_draft,
    load_tiny_target,
    tiny_eagle3,
    tiny_target,
    write_checkpoint,
)
from torch import Tensor

from overlap_spec.models.interfaces import DraftHead, LoadedDraft, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.linear_forms import FORMS, in_form
from overlap_spec.models.loading.loader import load_eagle3
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.speculative.interfaces import Prompts
from overlap_spec.speculative.proposers.autoregressive import AutoregressiveProposer, DeferredRows
from overlap_spec.speculative.rows import reading_only

F64 = torch.float64
TARGET = tiny_target(1)
ROWS = 11


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    inverse = 1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angles = positions.float()[:, None] * inverse
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(u: Tensor, t: dict[str, Tensor], prefix: str, config: dict[str, Any]) -> Tensor:
    """Causal attention of all rows at positions 0, 1, .., the mask written out."""
    rows, dim = u.shape[0], config["head_dim"]
    positions = torch.arange(rows)
    q, k, v = ((u @ t[f"{prefix}.self_attn.{part}_proj.weight"].T).view(rows, -1, dim) for part in ("q", "k", "v"))
    q, k = (rotate(x, positions, config["rope_theta"]) for x in (q, k))
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    scores = scores.masked_fill(positions[None, :] > positions[:, None], -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(rows, -1)
    return attended @ t[f"{prefix}.self_attn.o_proj.weight"].T


def mlp(x: Tensor, t: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up = (x @ t[f"{prefix}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ t[f"{prefix}.mlp.down_proj.weight"].T


def formula(checkpoint: TinyCheckpoint, features: Tensor, embedded: Tensor) -> Tensor:
    """The head's layers over all rows, from position 0, without any cache."""
    t, config = checkpoint.tensors, checkpoint.config
    h = features
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}" if index else "midlayer"
        if index == 0:
            normed = (norm(embedded, t[f"{prefix}.input_layernorm.weight"]), norm(h, t[f"{prefix}.hidden_norm.weight"]))
            u = torch.cat(normed, dim=1)
        else:
            u = norm(h, t[f"{prefix}.hidden_norm.weight"])
        h = h + attention(u, t, prefix, config)
        h = h + mlp(norm(h, t[f"{prefix}.post_attention_layernorm.weight"]), t, prefix)
    return h


def inputs(width: int) -> tuple[Tensor, TargetOutput]:
    random = torch.Generator().manual_seed(width)
    tokens = torch.randint(128, (ROWS,), generator=random)
    aux = torch.randn(ROWS, width, generator=random, dtype=F64)
    return tokens, TargetOutput(final=torch.randn(ROWS, 32, generator=random, dtype=F64), aux=aux)


def run(draft: LoadedDraft[DraftHead], tokens: Tensor, output: TargetOutput) -> tuple[Tensor, Tensor, Tensor]:
    """Features, output and logits of all rows: a chunk, then one row, then the rest."""
    paged = Paged(num_requests=1)
    head = draft.attach(KVCache.allocate(draft.profile.kv_shape, paged.num_pages, paged.page_size, F64, CPU), 512)
    features = head.fuse(output)
    chunks = [5, 1, ROWS - 6]
    parts = zip(tokens.split(chunks), features.split(chunks), chunks, strict=True)
    result = torch.cat([head.forward(part, feature, paged.rows([n])).values for part, feature, n in parts])
    return features, result, head.logits(head.enter(result)).compute()


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("agree", [True, False])
def test_the_head_is_its_formula(layers: int, agree: bool) -> None:
    target = load_tiny_target(TARGET)
    checkpoint = tiny_eagle3(2, TARGET, agree=agree, num_hidden_layers=layers)
    tokens, output = inputs(64)
    features, result, logits = run(load_tiny_draft(checkpoint, target), tokens, output)
    t = checkpoint.tensors
    torch.testing.assert_close(features, output.aux @ t["fc.weight"].T)
    expected = formula(checkpoint, features, target.embedding(tokens))
    torch.testing.assert_close(result, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(logits, norm(expected, t["norm.weight"]) @ t["lm_head.weight"].T, atol=1e-10, rtol=0)


def keys_values(checkpoint: TinyCheckpoint, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Of all rows in the last layer, by the formula. Shapes: -> [T, nkv, d] each."""
    t, config = checkpoint.tensors, checkpoint.config
    before = config["num_hidden_layers"] - 1
    prefix = f"layers.{before}" if before else "midlayer"
    h = formula(dataclasses.replace(checkpoint, config=config | {"num_hidden_layers": before}), features, embedded)
    u = norm(h, t[f"{prefix}.hidden_norm.weight"])
    if not before:
        u = torch.cat((norm(embedded, t[f"{prefix}.input_layernorm.weight"]), u), dim=1)
    k, v = (
        (u @ t[f"{prefix}.self_attn.{part}_proj.weight"].T).view(len(u), -1, config["head_dim"]) for part in ("k", "v")
    )
    return rotate(k, torch.arange(len(u)), config["rope_theta"]), v


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("cut", [True, False])
def test_rows_that_are_absorbed_have_the_keys_and_values_of_the_formula(layers: int, cut: bool) -> None:
    """And the rows after them attend to these. `cut`: weights of a format that gives keys and values apart."""
    target, num_absorbed = load_tiny_target(TARGET), 7
    checkpoint = tiny_eagle3(2, TARGET, num_hidden_layers=layers)
    draft, (tokens, output) = load_tiny_draft(checkpoint, target), inputs(64)
    if not cut:
        draft = in_form(draft, FORMS["x @ weight.T"], FORMS["x @ weight.T"])
    paged = Paged(num_requests=1)
    cache = KVCache.allocate(draft.profile.kv_shape, paged.num_pages, paged.page_size, F64, CPU)
    head = draft.attach(cache, 512)
    features, rows = head.fuse(output), paged.rows([num_absorbed])
    head.absorb(tokens[:num_absorbed], features[:num_absorbed], rows)
    for held, expected in zip(
        (cache.k, cache.v), keys_values(checkpoint, features, target.embedding(tokens)), strict=True
    ):
        found = held[-1].flatten(0, 1)[rows.cache_rows]
        torch.testing.assert_close(found, expected[:num_absorbed], atol=1e-10, rtol=0)
    after = head.forward(tokens[num_absorbed:], features[num_absorbed:], paged.rows([ROWS - num_absorbed]))
    expected = formula(checkpoint, features, target.embedding(tokens))[num_absorbed:]
    torch.testing.assert_close(after.values, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("layers", [1, 3])
def test_prompts_before_plain_steps_leave_the_keys_and_values_of_all_rows(layers: int) -> None:
    """Though of the chunk no other row than the last one would be read."""
    target, last = load_tiny_target(TARGET), torch.tensor([ROWS - 1])
    checkpoint = tiny_eagle3(2, TARGET, num_hidden_layers=layers)
    draft, (tokens, output) = load_tiny_draft(checkpoint, target), inputs(64)
    paged = Paged(num_requests=1)
    cache = KVCache.allocate(draft.profile.kv_shape, paged.num_pages, paged.page_size, F64, CPU)
    head, slots, rows = draft.attach(cache, 512), torch.tensor([0]), paged.rows([ROWS])
    proposer = AutoregressiveProposer(head, paged.page_size, DeferredRows.allocate(1, 0, 1, F64, CPU))
    prompts = Prompts(tokens, tokens, last, slots, slots, torch.ones_like(slots), proposes=False)
    proposer.prefill(prompts, reading_only(rows, last), output)
    expected = keys_values(checkpoint, head.fuse(output), target.embedding(tokens))
    for held, of_formula in zip((cache.k, cache.v), expected, strict=True):
        torch.testing.assert_close(held[-1].flatten(0, 1)[rows.cache_rows], of_formula, atol=1e-10, rtol=0)


def test_keys_and_values_are_a_view_of_contiguous_rows_and_else_come_with_queries() -> None:
    draft = load_tiny_draft(tiny_eagle3(2, TARGET), load_tiny_target(TARGET))
    (qkv,) = (layer.attention.qkv for layer in draft.layers)
    (cut,) = (layer.attention.keys_values for layer in draft.layers)
    shape = draft.layers[0].attention.shape
    assert cut.out_features == 2 * shape.num_kv_heads * shape.head_dim < qkv.out_features
    assert cut.stored.untyped_storage().data_ptr() == qkv.stored.untyped_storage().data_ptr()
    (formed,) = (layer.attention for layer in in_form(draft, FORMS["weight @ x.T"], FORMS["weight @ x.T"]).layers)
    assert formed.keys_values is formed.qkv


def test_next_features_are_the_residual_sum_or_its_norm() -> None:
    target = load_tiny_target(TARGET)
    x = torch.randn(3, 32, dtype=F64)
    for norm_output in (False, True):
        checkpoint = tiny_eagle3(3, TARGET, norm_output=norm_output)
        draft = load_tiny_draft(checkpoint, target)
        head = draft.attach(KVCache.allocate(draft.profile.kv_shape, 2, 4, F64, CPU), 16)
        expected = norm(x, checkpoint.tensors["norm.weight"]) if norm_output else x
        torch.testing.assert_close(head.next_features(head.enter(x)), expected)


def renamed(checkpoint: TinyCheckpoint, **names: str) -> TinyCheckpoint:
    tensors = checkpoint.tensors
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return dataclasses.replace(checkpoint, tensors=tensors)


def prefixed(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    own = ("d2t", "t2d", "lm_head.weight")
    tensors = {name if name in own else f"model.{name}": tensor for name, tensor in checkpoint.tensors.items()}
    return dataclasses.replace(checkpoint, tensors=tensors)


def spelled_llama(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    return dataclasses.replace(checkpoint, config=checkpoint.config | {"architectures": ["LlamaForCausalLM"]})


def with_embedding(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    """An embedding of its own that is not the target's is there and not used."""
    return dataclasses.replace(
        checkpoint, tensors=checkpoint.tensors | {"embed_tokens.weight": torch.zeros(128, 32, dtype=F64)}
    )


def without_mask(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    return dataclasses.replace(checkpoint, tensors={k: v for k, v in checkpoint.tensors.items() if k != "t2d"})


LAYOUTS = {
    "as published": lambda c: c,
    "layers.0": lambda c: renamed(c, midlayer="layers.0"),
    "model. prefix": prefixed,
    "model. prefix and layers.0": lambda c: prefixed(renamed(c, midlayer="layers.0")),
    "plain architecture": spelled_llama,
    "own embedding": with_embedding,
    "no t2d": without_mask,
}


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_head(layout: str, binary: bool, tmp_path: Path) -> None:
    target = load_tiny_target(TARGET)
    checkpoint = tiny_eagle3(4, TARGET)
    write_checkpoint(tmp_path, LAYOUTS[layout](checkpoint), binary=binary)
    loaded = load_eagle3(DraftSource(str(tmp_path), F64, CPU), target)
    expected = load_tiny_draft(checkpoint, target)
    tokens, output = inputs(64)
    for mine, theirs in zip(run(loaded, tokens, output), run(expected, tokens, output), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(loaded.target_ids, expected.target_ids)


def test_target_ids_are_offsets_from_the_draft_id() -> None:
    checkpoint = tiny_eagle3(5, TARGET, draft_vocab=40)
    draft = load_tiny_draft(checkpoint, load_tiny_target(TARGET))
    assert draft.target_ids.tolist() == checkpoint.tensors["t2d"].nonzero().flatten().tolist()
    assert draft.profile.draft_vocab_size == 40


def test_a_null_draft_vocabulary_shares_the_targets_head() -> None:
    target = load_tiny_target(TARGET)
    draft = load_tiny_draft(tiny_eagle3(6, TARGET, draft_vocab=None), target)
    assert draft.head.stored is target.head.stored
    assert draft.target_ids.tolist() == list(range(128))
    assert draft.profile.num_bytes < target.num_bytes, "shared tensors are not counted"


def test_default_aux_layers_follow_the_number_of_layers() -> None:
    deep = tiny_target(7, layers=12)
    checkpoint = tiny_eagle3(8, deep, aux_layers=(1, 5, 8))
    config = {key: value for key, value in checkpoint.config.items() if key != "eagle_config"}
    draft = load_tiny_draft(dataclasses.replace(checkpoint, config=config), load_tiny_target(deep))
    assert draft.profile.aux_layers == (1, 5, 8)


def test_without_aux_layers_the_final_hidden_state_is_the_feature() -> None:
    target = load_tiny_target(TARGET)
    checkpoint = tiny_eagle3(9, TARGET)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "fc.weight"}
    config = checkpoint.config | {"eagle_config": {"use_aux_hidden_state": False}}
    draft = load_tiny_draft(TinyCheckpoint(config, tensors), target)
    tokens, output = inputs(64)
    plain = TargetOutput(output.hidden, output.hidden.new_empty(ROWS, 0))
    features, result, _ = run(draft, tokens, plain)
    assert draft.profile.aux_layers == ()
    torch.testing.assert_close(features, plain.hidden)
    torch.testing.assert_close(result, formula(checkpoint, features, target.embedding(tokens)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("names", [("fc_norm.0", "fc_norm.1"), ("aux_norm_low", "aux_norm_mid")])
def test_aux_hidden_states_may_be_normed_one_by_one(names: tuple[str, str]) -> None:
    checkpoint = tiny_eagle3(10, TARGET, bias=True)
    random = torch.Generator().manual_seed(1)
    norms = [torch.rand(32, generator=random, dtype=F64) for _ in names]
    bias = torch.rand(32, generator=random, dtype=F64)
    extra = {f"{name}.weight": weight for name, weight in zip(names, norms, strict=True)} | {"fc.bias": bias}
    draft = load_tiny_draft(TinyCheckpoint(checkpoint.config, checkpoint.tensors | extra), load_tiny_target(TARGET))
    tokens, output = inputs(64)
    aux_hidden = zip(output.aux.chunk(2, dim=1), norms, strict=True)
    normed = torch.cat([norm(each, weight) for each, weight in aux_hidden], dim=1)
    expected = normed @ checkpoint.tensors["fc.weight"].T + bias
    torch.testing.assert_close(run(draft, tokens, output)[0], expected)


def test_a_wider_target_needs_the_heads_own_embedding() -> None:
    wide = tiny_target(11, hidden=48)
    narrow = tiny_eagle3(12, TARGET, target_hidden_size=48)
    random = torch.Generator().manual_seed(2)
    own = {
        "fc.weight": torch.randn(32, 96, generator=random, dtype=F64),
        "embed_tokens.weight": torch.randn(128, 32, generator=random, dtype=F64),
    }
    draft = load_tiny_draft(TinyCheckpoint(narrow.config, narrow.tensors | own), load_tiny_target(wide))
    tokens, output = inputs(96)
    features, result, _ = run(draft, tokens, output)
    expected = formula(narrow, features, own["embed_tokens.weight"][tokens])
    torch.testing.assert_close(result, expected, atol=1e-10, rtol=0)


def test_agreeing_heads_are_neither_always_nor_never_right() -> None:
    """What the other tests' random schedules rely on: over a greedy text, guesses right and wrong in every mix."""
    target = load_tiny_target(TARGET)
    draft = load_tiny_draft(tiny_eagle3(13, TARGET), target)
    paged, tokens = Paged(num_requests=1, pages_each=64), [5, 17, 40]
    cache = KVCache.allocate(target.kv_shape, paged.num_pages, paged.page_size, F64, CPU)
    model = target.attach(cache, 512, draft.profile.aux_layers)
    outputs = [model.forward(torch.tensor(tokens), paged.rows([3]))]
    while len(tokens) < 120:
        tokens.append(int(model.logits(outputs[-1].hidden[-1:]).argmax()))
        outputs.append(model.forward(torch.tensor(tokens[-1:]), paged.rows([1])))
    paged.lengths = [0]
    head = draft.attach(KVCache.allocate(draft.profile.kv_shape, paged.num_pages, paged.page_size, F64, CPU), 512)
    aux = torch.cat([output.aux for output in outputs])[:-2]
    features = head.fuse(TargetOutput(aux, aux))
    guesses = draft.target_ids[
        head.logits(head.forward(torch.tensor(tokens[1:-1]), features, paged.rows([len(tokens) - 2]))).argmax()
    ]
    right = (guesses == torch.tensor(tokens[2:])).float()
    assert 0.3 < right.mean() < 0.95
    assert len(set(tokens)) > 10
