"""The EAGLE head against its formula written out, in every layout that checkpoints come in, and with a token map."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.eagle import load_tiny_eagle, tiny_eagle
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_eagle3, tiny_target, write_checkpoint
from test_eagle3 import attention, mlp, norm, run
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.eagle import EagleWeights
from overlap_spec.models.interfaces import TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.loading.loader import load_eagle
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.work import count_bytes

F64 = torch.float64
TARGET = tiny_target(1)
ROWS = 11


def formula(checkpoint: TinyCheckpoint, features: Tensor, embedded: Tensor) -> Tensor:
    """fc and layers over all rows, from position 0, without any cache."""
    t, config = checkpoint.tensors, checkpoint.config
    h = torch.cat((embedded, features), dim=1) @ t["fc.weight"].T
    h = h + t["fc.bias"] if "fc.bias" in t else h
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}"
        h = h + attention(norm(h, t[f"{prefix}.input_layernorm.weight"]) if index else h, t, prefix, config)
        h = h + mlp(norm(h, t[f"{prefix}.post_attention_layernorm.weight"]), t, prefix)
    return h


def inputs() -> tuple[Tensor, TargetOutput]:
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(128, (ROWS,), generator=random)
    return tokens, TargetOutput(torch.randn(ROWS, 32, generator=random, dtype=F64), torch.empty(ROWS, 0, dtype=F64))


def without_bias(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "fc.bias"}
    return TinyCheckpoint(checkpoint.config | {"bias": False}, tensors)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_head_is_its_formula(layers: int, agree: bool, bias: bool) -> None:
    target = load_tiny_target(TARGET)
    checkpoint = tiny_eagle(2, TARGET, agree=agree, num_hidden_layers=layers)
    checkpoint = checkpoint if bias else without_bias(checkpoint)
    tokens, output = inputs()
    features, result, logits = run(load_tiny_eagle(checkpoint, target), tokens, output)
    torch.testing.assert_close(features, output.hidden)
    expected = formula(checkpoint, features, target.embedding(tokens))
    torch.testing.assert_close(result, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(logits, expected @ TARGET.tensors["lm_head.weight"].T, atol=1e-10, rtol=0)


def test_the_output_is_the_next_features() -> None:
    draft = load_tiny_eagle(tiny_eagle(3, TARGET), load_tiny_target(TARGET))
    head = draft.attach(KVCache.allocate(draft.profile.kv_shape, 2, 4, F64, CPU), 16)
    x = torch.randn(3, 32, dtype=F64)
    assert head.next_features(head.enter(x)) is x


def prefixed(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    tensors = {f"model.{name}": tensor for name, tensor in checkpoint.tensors.items()}
    return dataclasses.replace(checkpoint, tensors=tensors)


def spelled_llama(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    return dataclasses.replace(checkpoint, config=checkpoint.config | {"architectures": ["LlamaForCausalLM"]})


def with_unused(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    """Embedding and head of its own that are not the target's are there and not used."""
    own = {name: torch.zeros(128, 32, dtype=F64) for name in ("embed_tokens.weight", "lm_head.weight")}
    return dataclasses.replace(checkpoint, tensors=checkpoint.tensors | own)


LAYOUTS = {
    "as published": lambda c: c,
    "model. prefix": prefixed,
    "plain architecture": spelled_llama,
    "own embedding and head": with_unused,
    "all of it": lambda c: prefixed(spelled_llama(with_unused(c))),
}


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_head(layout: str, binary: bool, tmp_path: Path) -> None:
    target = load_tiny_target(TARGET)
    checkpoint = tiny_eagle(4, TARGET)
    write_checkpoint(tmp_path, LAYOUTS[layout](checkpoint), binary=binary)
    tokens, output = inputs()
    loaded, expected = load_eagle(DraftSource(str(tmp_path), F64, CPU), target), load_tiny_eagle(checkpoint, target)
    for mine, theirs in zip(run(loaded, tokens, output), run(expected, tokens, output), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_embedding_and_head_are_the_targets() -> None:
    target = load_tiny_target(TARGET)
    draft = load_tiny_eagle(tiny_eagle(5, TARGET), target)
    assert draft.embedding is target.embedding and draft.head is target.head
    assert draft.target_ids.tolist() == list(range(128))
    assert draft.profile.num_bytes == count_bytes((draft.fc, draft.layers, draft.target_ids))


def test_a_token_map_picks_rows_of_the_targets_head() -> None:
    target, checkpoint = load_tiny_target(TARGET), tiny_eagle(6, TARGET)
    ids = torch.tensor([7, 3, 120, 64, 5])
    whole, mapped = load_tiny_eagle(checkpoint, target), load_tiny_eagle(checkpoint, target, ids)
    tokens, output = inputs()
    torch.testing.assert_close(run(mapped, tokens, output)[2], run(whole, tokens, output)[2][:, ids])
    assert mapped.target_ids.tolist() == ids.tolist()
    assert mapped.profile.draft_vocab_size == 5
    assert mapped.num_bytes == whole.num_bytes - (128 - 5) * 8 + 5 * 32 * 8, "its rows are its own"
    assert mapped.profile.work.head_flop < whole.profile.work.head_flop


def test_a_map_is_read_with_the_head(tmp_path: Path) -> None:
    head = write_checkpoint(tmp_path / "head", tiny_eagle(7, TARGET))
    torch.save([9, 1, 5], tmp_path / "map.pt")
    draft = load_eagle(DraftSource(str(head), F64, CPU, token_map=str(tmp_path / "map.pt")), load_tiny_target(TARGET))
    assert draft.profile.draft_vocab_size == 3
    torch.save([9, 128], tmp_path / "map.pt")
    with pytest.raises(CheckpointError, match="found token id 128, expected 0 to 127"):
        load_eagle(DraftSource(str(head), F64, CPU, token_map=str(tmp_path / "map.pt")), load_tiny_target(TARGET))


@pytest.mark.parametrize("token_map", [None, [4, 2, 100]])
def test_dummy_weights_need_a_config_alone(token_map: list[int] | None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_eagle(8, TARGET))
    (tmp_path / "model.safetensors").unlink()
    torch.save(token_map, tmp_path / "map.pt")
    named = None if token_map is None else str(tmp_path / "map.pt")
    draft = load_eagle(
        DraftSource(str(tmp_path), F64, CPU, load_format="dummy", token_map=named), load_tiny_target(TARGET)
    )
    assert isinstance(draft, EagleWeights)
    logits = run(draft, *inputs())[2]
    assert logits.shape == (ROWS, 128 if token_map is None else 3) and logits.isfinite().all()


def test_a_head_of_another_target_is_refused() -> None:
    with pytest.raises(CheckpointError, match="hidden_size 32 is not the target's, which is 48"):
        load_tiny_eagle(tiny_eagle(9, TARGET), load_tiny_target(tiny_target(1, hidden=48)))


def test_a_bias_that_the_config_promises_must_be_there() -> None:
    checkpoint = tiny_eagle(10, TARGET)
    tensors = without_bias(checkpoint).tensors
    with pytest.raises(CheckpointError, match=r"tensor fc\.bias is missing"):
        load_tiny_eagle(TinyCheckpoint(checkpoint.config, tensors), load_tiny_target(TARGET))


def test_a_tensor_without_a_place_is_refused() -> None:
    checkpoint = tiny_eagle(11, TARGET)
    tensors = checkpoint.tensors | {"layers.0.input_layernorm.weight": torch.ones(32, dtype=F64)}
    with pytest.raises(CheckpointError, match=r"unexpected tensor layers\.0\.input_layernorm\.weight"):
        load_tiny_eagle(TinyCheckpoint(checkpoint.config, tensors), load_tiny_target(TARGET))


@pytest.mark.parametrize(
    ("other", "words"),
    [(tiny_eagle3(12, TARGET), "an EAGLE-3 head"), (TARGET, "an ordinary language model")],
    ids=["EAGLE-3", "language model"],
)
def test_what_is_no_eagle_head_is_named(other: TinyCheckpoint, words: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, other)
    with pytest.raises(CheckpointError, match=f"expected an EAGLE / EAGLE-2 head, but this looks like {words}"):
        load_eagle(DraftSource(str(tmp_path), F64, CPU), load_tiny_target(TARGET))


def test_agreeing_heads_are_neither_always_nor_never_right() -> None:
    """What random schedules rely on: over a greedy text, guesses right and wrong in every mix."""
    target = load_tiny_target(TARGET)
    draft = load_tiny_eagle(tiny_eagle(13, TARGET), target)
    paged, tokens = Paged(num_requests=1, pages_each=64), [5, 17, 40]
    cache = KVCache.allocate(target.kv_shape, paged.num_pages, paged.page_size, F64, CPU)
    model = target.attach(cache, 512)
    hidden = [model.forward(torch.tensor(tokens), paged.rows([3])).hidden]
    while len(tokens) < 120:
        tokens.append(int(model.logits(hidden[-1][-1:]).argmax()))
        hidden.append(model.forward(torch.tensor(tokens[-1:]), paged.rows([1])).hidden)
    paged.lengths = [0]
    head = draft.attach(KVCache.allocate(draft.profile.kv_shape, paged.num_pages, paged.page_size, F64, CPU), 512)
    output = head.forward(torch.tensor(tokens[1:-1]), torch.cat(hidden)[: len(tokens) - 2], paged.rows([118]))
    right = (draft.target_ids[head.logits(output).argmax()] == torch.tensor(tokens[2:])).double()
    assert 0.2 < right.mean() < 0.95
