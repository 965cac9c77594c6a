"""The MTP layer against its formula written out, and what its checkpoints may and may not hold."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.paged_rows import Paged
from support.reference.mtp import DeepSeek, Mimo, ReferenceMtp
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.mtp import in_deepseek_layout, load_tiny_mtp, tiny_mtp, with_mtp
from torch import Tensor

from overlap_spec.config import ModelFiles
from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.mtp import MtpHead, MtpWeights
from overlap_spec.models.interfaces import TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.loading.loader import load_eagle, load_mtp, load_mtp_layers, load_target
from overlap_spec.models.loading.sources import DraftSource

F64 = torch.float64
TARGET = tiny_target(1)
MIMO = with_mtp(2, TARGET)
ROWS, DRAFTED = 11, 3


def inputs() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randint(128, (ROWS,), generator=random), torch.randn(ROWS, 32, generator=random, dtype=F64)


def attached(weights: MtpWeights, paged: Paged) -> MtpHead:
    return weights.attach(KVCache.allocate(weights.profile.kv_shape, paged.num_pages, paged.page_size, F64, CPU), 64)


def reference(checkpoint: TinyCheckpoint, layout: Mimo) -> ReferenceMtp:
    embed, head = TARGET.tensors["model.embed_tokens.weight"], TARGET.tensors["lm_head.weight"]
    return ReferenceMtp(checkpoint.tensors, checkpoint.config, embed, head, layout)


def files_of(directory: Path, checkpoint: TinyCheckpoint, load_format: str = "auto") -> ModelFiles:
    write_checkpoint(directory, checkpoint)
    return ModelFiles(
        weights=str(directory),
        config=checkpoint.config,
        tokenizer_dir=None,
        eos_token_ids=(2,),
        context_length=512,
        vocab_size=128,
        load_format=load_format,
    )


@pytest.mark.parametrize("layout", [Mimo(), DeepSeek()], ids=["MiMo", "DeepSeek"])
def test_rows_of_a_prompt_and_of_draft_steps_are_the_formulas(layout: Mimo) -> None:
    checkpoint = tiny_mtp(5, TARGET, agree=False)
    checkpoint = in_deepseek_layout(checkpoint) if isinstance(layout, DeepSeek) else checkpoint
    paged, expected = Paged(num_requests=1), reference(checkpoint, layout)
    head = attached(load_tiny_mtp(checkpoint, load_tiny_target(TARGET)), paged)
    tokens, hidden = inputs()
    features = head.fuse(TargetOutput(hidden, hidden.new_empty(ROWS, 0)))
    first, second = (
        head.forward(tokens[p], features[p], paged.rows([len(tokens[p])])) for p in (slice(4), slice(4, 11))
    )
    wanted = expected.forward(tokens.tolist(), hidden, 0)
    torch.testing.assert_close(torch.cat((first.normalised(), second.normalised())), wanted, atol=1e-9, rtol=0)
    drafted, row = head.enter(second.values[-1:]), wanted[-1]
    for i in range(DRAFTED):
        guess = head.logits(drafted).argmax(head.target_ids)
        assert guess.tolist() == [expected.guess(row)]
        drafted = head.forward(guess, head.next_features(drafted), paged.rows([1]))
        row = expected.forward(guess.tolist(), row[None], ROWS + i)[0]
        torch.testing.assert_close(drafted.normalised()[0], row, atol=1e-9, rtol=0)


def test_the_embedding_at_position_0_counts_for_nothing() -> None:
    weights = load_tiny_mtp(tiny_mtp(5, TARGET, agree=False), load_tiny_target(TARGET))
    tokens, hidden = inputs()
    same, other = tokens.clone(), tokens.clone()
    same[0], other[1] = (tokens[0] + 1) % 128, (tokens[1] + 1) % 128
    ours, unchanged, changed = (
        attached(weights, Paged(1)).forward(t, hidden, Paged(1).rows([ROWS])).values for t in (tokens, same, other)
    )
    torch.testing.assert_close(ours, unchanged, atol=1e-12, rtol=0)
    assert (ours - changed).abs().max() > 1e-3


def test_a_checkpoint_holds_target_and_layer_and_each_leaves_the_other_alone(tmp_path: Path) -> None:
    target = load_target(files_of(tmp_path / "mimo", MIMO), F64, CPU)
    qwen = {name: tensor for name, tensor in MIMO.tensors.items() if ".mtp_layers." not in name}
    plain = TinyCheckpoint(MIMO.config | {"architectures": ["Qwen2ForCausalLM"]}, qwen)
    other = load_target(files_of(tmp_path / "qwen", plain), F64, CPU)
    tokens, _ = inputs()
    paged = Paged(num_requests=1)
    rows = paged.rows([ROWS])
    ran = [
        model.attach(KVCache.allocate(model.kv_shape, paged.num_pages, 4, F64, CPU), 64).forward(tokens, rows).hidden
        for model in (target, other)
    ]
    torch.testing.assert_close(*ran, atol=1e-12, rtol=0)
    layer = load_mtp(DraftSource(str(tmp_path / "mimo"), F64, CPU), target)
    assert isinstance(layer, MtpWeights)
    assert layer.embedding is target.embedding and layer.head is target.head
    assert (layer.profile.aux_layers, layer.profile.kv_shape.num_layers, layer.profile.draft_vocab_size) == ((), 1, 128)
    own = sum(t.nbytes // t.itemsize for name, t in MIMO.tensors.items() if ".mtp_layers." in name)
    assert layer.profile.num_bytes == 8 * (own + 128)  # float64, and the identity map of tokens
    assert isinstance(load_eagle(DraftSource(str(tmp_path / "mimo"), F64, CPU), target), MtpWeights)
    alone = load_tiny_mtp(tiny_mtp(2, TARGET), target)
    gated = ran[0].repeat(1, 2)
    torch.testing.assert_close(alone.layer.mlp.down(gated), layer.layer.mlp.down(gated), atol=1e-12, rtol=0)


def test_the_target_of_a_layer_after_its_last_is_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, in_deepseek_layout(MIMO))
    target = load_target(files_of(tmp_path, in_deepseek_layout(MIMO)), F64, CPU)
    assert target.num_layers == 2
    ours, mimo = (
        load_mtp(DraftSource(str(path), F64, CPU), target)
        for path in (tmp_path, write_checkpoint(tmp_path / "m", MIMO))
    )
    assert isinstance(ours, MtpWeights) and isinstance(mimo, MtpWeights)
    assert (ours.profile.num_bytes, ours.embeds_first, mimo.embeds_first) == (mimo.profile.num_bytes, True, False)
    both = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(4), dtype=F64)
    torch.testing.assert_close(ours.fc(both), mimo.fc(both), atol=1e-12, rtol=0)


def test_a_token_map_leaves_some_rows_of_the_head(tmp_path: Path) -> None:
    target = load_tiny_target(TARGET)
    ids = torch.tensor([5, 3, 90])
    layer = load_tiny_mtp(tiny_mtp(5, TARGET), target, ids)
    assert layer.profile.draft_vocab_size == 3 and torch.equal(layer.head.stored, target.head.stored[ids])
    assert torch.equal(layer.target_ids, ids)


def test_biases_of_zero_are_left_out() -> None:
    """As in a checkpoint that was merged from a target without them."""
    zero = replace(MIMO, tensors={name: t * (".bias" not in name) for name, t in MIMO.tensors.items()})
    target, other = load_tiny_target(zero), load_tiny_target(MIMO)
    assert target.layers[1].attention.qkv.bias is None and other.layers[1].attention.qkv.bias is not None
    layer = replace(zero, tensors={name: t for name, t in zero.tensors.items() if ".mtp_layers." in name})
    assert load_tiny_mtp(layer, target).layer.attention.qkv.bias is None


def test_dummy_weights_have_the_layers_shape(tmp_path: Path) -> None:
    target = load_target(files_of(tmp_path, MIMO, "dummy"), torch.float32, CPU)
    dummy = load_mtp(DraftSource(str(tmp_path), torch.float32, CPU, load_format="dummy"), target)
    real = load_mtp(DraftSource(str(tmp_path), torch.float32, CPU), target)
    assert dummy.profile == real.profile


def _second_layer(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    more = {name.replace("layers.0", "layers.1"): t for name, t in checkpoint.tensors.items() if "mtp" in name}
    more |= {name.replace("layers.2", "layers.3"): t for name, t in checkpoint.tensors.items() if "layers.2." in name}
    return replace(checkpoint, tensors=checkpoint.tensors | more)


def _without(checkpoint: TinyCheckpoint, name: str) -> TinyCheckpoint:
    return replace(checkpoint, tensors={key: t for key, t in checkpoint.tensors.items() if name not in key})


SPARSE = {  # what drafts for them is such a layer, or several
    "DeepseekV32ForCausalLM": (
        {"n_routed_experts": 256, "kv_lora_rank": 512, "index_topk": 2048},
        1,
        "sparse attention by an indexer .index_topk 2048.*nearest one is DeepseekV3",
    ),
    "BailingMoeV2ForCausalLM": ({"num_experts": 256}, 1, "mixture of experts"),
    "Qwen2MoeForCausalLM": ({"num_experts": 60}, None, "mixture of experts .num_experts 60.*nearest one is Qwen3Moe"),
    "MiniCPM3ForCausalLM": ({"kv_lora_rank": 256}, None, "multi-head latent attention .kv_lora_rank 256"),
    "Step1ForCausalLM": ({}, None, "architecture Step1ForCausalLM is not supported; supported: LlamaForCausalLM"),
}


@pytest.mark.parametrize("name", SPARSE)
def test_targets_that_come_later_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """Before a weight is read, and as what holds the layers too."""
    keys, num_layers, message = SPARSE[name]
    config = TARGET.config | {"architectures": [name], "num_nextn_predict_layers": num_layers} | keys
    files = files_of(tmp_path, TinyCheckpoint(config, {"nothing.weight": torch.zeros(1)}), "dummy")
    with pytest.raises(CheckpointError, match=message) as refused:
        load_target(files, F64, CPU)
    assert name in str(refused.value)
    with pytest.raises(CheckpointError, match=message):
        load_mtp(DraftSource(str(tmp_path), F64, CPU, load_format="dummy"), load_tiny_target(TARGET))
    with pytest.raises(CheckpointError, match=message):
        load_mtp_layers(
            DraftSource.for_target(str(tmp_path), load_tiny_target(TARGET), load_format="dummy"),
            load_tiny_target(TARGET),
            3,
        )


WRONG = {
    "two layers": (_second_layer(MIMO), "--enable-multi-layer-eagle"),
    "no layer": (_without(MIMO, "mtp_layers"), "this looks like an ordinary language model"),
    "two layers after the last": (_second_layer(in_deepseek_layout(MIMO)), "--enable-multi-layer-eagle"),
    "an EAGLE-3 head": (tiny_eagle3(4, TARGET), "this looks like an EAGLE-3 head"),
    "a tensor is missing": (_without(MIMO, "input_proj"), r"layers.0.input_proj.weight is missing"),
    "another width": (tiny_mtp(4, tiny_target(1, hidden=64)), "hidden_size is 64, but the target's is 32"),
    "other tokens": (tiny_mtp(4, tiny_target(1, vocab=64)), "vocab_size is 64, but the target's is 128"),
    "a tensor too many": (
        replace(MIMO, tensors=MIMO.tensors | {"model.mtp_layers.0.gate.weight": torch.zeros(2)}),
        "unexpected tensor model.mtp_layers.0.gate.weight",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_such_layer_is_refused(what: str, tmp_path: Path) -> None:
    checkpoint, message = WRONG[what]
    write_checkpoint(tmp_path, checkpoint)
    with pytest.raises(CheckpointError, match=message):
        load_mtp(DraftSource(str(tmp_path), F64, CPU), load_tiny_target(TARGET))
