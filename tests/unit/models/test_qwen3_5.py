"""Qwen3.5's text models: their logits against transformers, from files that hold images' tensors, too."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny.drawn import TOKENS, loaded, logits_of, random_checkpoint, without_effect
from support.tiny.families import MROPE, TINY_FAMILIES
from support.tiny.layouts import fused_experts
from support.tiny.models import TinyCheckpoint, load_tiny_target, tiny_config, tiny_target, write_checkpoint
from support.tiny.mtp import tiny_qwen3_next
from support.tiny.quantized import quantised
from transformers import AutoConfig, AutoModelForCausalLM

from overlap_spec.config import EngineConfig
from overlap_spec.config.speculation import keeps_states, num_own_layers
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.hub.config_values import of_text
from overlap_spec.models.layers.experts import MixtureMLP
from overlap_spec.models.loading.loader import load_mtp
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.targets import qwen3_next

F64, CPU = torch.float64, torch.device("cpu")
FAMILIES = ("qwen3.5", "qwen3.5 moe")
OF_WHOLE = ("architectures", "tie_word_embeddings", "eos_token_id")
QUANTIZED = {"quant_method": "gptq", "bits": 4, "desc_act": False, "group_size": 64, "sym": False}


def as_published(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    """Under the names of a model that reads images, with some tensors of the part that does."""
    config = checkpoint.config
    whole: dict[str, Any] = {key: config[key] for key in OF_WHOLE} | {"model_type": "qwen3_5", "vision_config": {}}
    whole["text_config"] = {key: value for key, value in config.items() if key not in OF_WHOLE}
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in checkpoint.tensors.items()}
    images = {f"model.visual.blocks.{index}.norm1.weight": torch.zeros(3) for index in range(4)}
    return TinyCheckpoint(whole, tensors | images)


def transformers_logits(checkpoint: TinyCheckpoint) -> torch.Tensor:
    """Of its text model, whose weights are the checkpoint's, all of them."""
    settings = {key: value for key, value in checkpoint.config.items() if key != "architectures"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).eval()
    missing, unexpected = model.load_state_dict(fused_experts(checkpoint.tensors), strict=False)
    assert not missing and not unexpected
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_from_published_files(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three layers that recur and one that attends; positions in three parts are one for text."""
    checkpoint = random_checkpoint(family, layers=4, full_attention_interval=4)
    assert checkpoint.config["rope_parameters"]["mrope_section"] == MROPE["mrope_section"]
    path = write_checkpoint(tmp_path, as_published(checkpoint))
    with caplog.at_level(logging.INFO):
        found = logits_of(loaded(path))
    torch.testing.assert_close(found, transformers_logits(checkpoint), atol=1e-4, rtol=0)
    assert "4 tensors of vision and audio are skipped: requests are text" in caplog.text


def test_int4_files_leave_out_what_their_rules_name(tmp_path: Path) -> None:
    """As Qwen's files of GPTQModel: attention, layers that recur and the expert of all rows stay in 16 bits."""
    kept = ("attn", "shared_expert", "mtp")
    plain = tiny_target(3, **TINY_FAMILIES["qwen3.5 moe"] | {"hidden": 64, "moe_intermediate_size": 64})
    stored, meant = quantised(tiny_qwen3_next(5, plain), "gptq", kept)
    rules: dict[str, Any] = {"lm_head": {}, "model.language_model.embed_tokens": {}}
    rules |= {f"-:.*{part}.*": {} for part in (*kept, "visual")}
    published = as_published(stored)
    published.config["quantization_config"] = QUANTIZED | {"dynamic": rules}
    target = loaded(write_checkpoint(tmp_path / "stored", published), F64)
    assert any(name.endswith(".experts.7.up_proj.qweight") for name in published.tensors)
    expected = loaded(write_checkpoint(tmp_path / "meant", as_published(meant)), F64)
    torch.testing.assert_close(logits_of(target, F64), logits_of(expected, F64), atol=1e-7, rtol=0)
    assert load_mtp(DraftSource(str(tmp_path / "stored"), F64, CPU), target).profile.num_bytes


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_counts(family: str) -> None:
    checkpoint = random_checkpoint(family)
    attended = [name for name in checkpoint.tensors if ".experts." not in name or ".experts.0." in name]
    assert not without_effect(checkpoint, attended) and any("in_proj_z" in name for name in attended)


def test_other_tensors_are_not_skipped(tmp_path: Path) -> None:
    published = as_published(random_checkpoint("qwen3.5"))
    more = TinyCheckpoint(published.config, published.tensors | {"model.audio.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="unexpected tensor model.audio.weight"):
        loaded(write_checkpoint(tmp_path, more))


def test_the_config_of_the_text_model_is_the_engines(tmp_path: Path) -> None:
    checkpoint = as_published(tiny_target(3, **TINY_FAMILIES["qwen3.5 moe"], tie_word_embeddings=True))
    checkpoint.config["text_config"]["tie_word_embeddings"] = False
    files = resolve_model(
        EngineConfig(model_path=str(write_checkpoint(tmp_path, checkpoint)), skip_tokenizer_init=True)
    )
    assert files.vocab_size == 128 and files.context_length == 512 and files.eos_token_ids == (2,)
    assert files.config["tie_word_embeddings"] and keeps_states(files.config) and "text_config" not in files.config


def test_layers_and_experts() -> None:
    dense, mixture = (load_tiny_target(random_checkpoint(family)) for family in FAMILIES)
    assert not [layer for layer in dense.layers if isinstance(layer.mlp, MixtureMLP)]
    assert all(isinstance(layer.mlp, MixtureMLP) and layer.mlp.shared is not None for layer in mixture.layers)
    assert dense.kv_shape == mixture.kv_shape


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_output_gate": False}, "attn_output_gate False is not supported; expected True"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings True is not supported"),
        ({"rope_parameters": MROPE | {"rope_type": "yarn"}}, "rope type 'yarn' over part of a head is not supported"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {said}"):
        qwen3_next.read_qwen3_5(tiny_config(**TINY_FAMILIES["qwen3.5"] | changes), "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_that_drafts_is_found_in_published_files(family: str, tmp_path: Path) -> None:
    plain = tiny_target(3, **TINY_FAMILIES[family])
    checkpoint = as_published(tiny_qwen3_next(5, plain))
    path = write_checkpoint(tmp_path, checkpoint)
    assert num_own_layers(of_text(json.loads((path / "config.json").read_text()))) == 1
    target = loaded(path, F64)
    found = load_mtp(DraftSource(str(path), F64, CPU), target)
    names = [name for name in checkpoint.tensors if name.startswith("mtp.")]
    assert found.profile.num_bytes >= sum(checkpoint.tensors[name].nbytes for name in names)
    assert num_own_layers(plain.config) == 0
