"""Tiny random checkpoints of every architecture in every format of weights, as files, for the matrix of models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from overlap_spec.models.interfaces import LoadedTarget
from support.gguf_files import KIND, write_gguf
from support.int8_linears import with_int8_linears
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import TinyCheckpoint, tiny_target, write_checkpoint
from support.tiny.quantized import FORMATS as QUANTISED, quantised

# Of latent attention, where rows must fill whole blocks.
LATENT_IN_RUNS = {"moe_intermediate_size": 128, "q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 32}

# By the name in config.json: what a tiny one says beside `tiny_config`.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": TINY_FAMILIES["llama"],
    "MistralForCausalLM": TINY_FAMILIES["mistral with a window"],
    "Qwen2ForCausalLM": TINY_FAMILIES["qwen2"] | {"use_sliding_window": False},
    "MiMoForCausalLM": {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"},
    "Qwen3ForCausalLM": TINY_FAMILIES["qwen3"],
    "Gemma3ForCausalLM": TINY_FAMILIES["gemma 3"],
    "Gemma4ForCausalLM": TINY_FAMILIES["gemma 4"] | {"global_head_dim": 32},
    "Gemma4ForConditionalGeneration": TINY_FAMILIES["gemma 4 e"]
    | {"global_head_dim": 32, "hidden_size_per_layer_input": 128},
    "Olmo2ForCausalLM": TINY_FAMILIES["olmo 2"],
    "Phi3ForCausalLM": TINY_FAMILIES["phi 3 in part"],
    "Qwen3MoeForCausalLM": TINY_FAMILIES["qwen3 moe"] | {"moe_intermediate_size": 128},
    "MixtralForCausalLM": TINY_FAMILIES["mixtral"],
    "DeepseekV2ForCausalLM": TINY_FAMILIES["deepseek v2 lite"] | LATENT_IN_RUNS | {"q_lora_rank": None},
    "DeepseekV3ForCausalLM": TINY_FAMILIES["deepseek v3"] | LATENT_IN_RUNS,
    "MiMoV2FlashForCausalLM": TINY_FAMILIES["mimo v2 flash"] | {"moe_intermediate_size": 128},
    "Step3p5ForCausalLM": TINY_FAMILIES["step 3.5"] | {"share_expert_dim": 128},
    "GraniteMoeHybridForCausalLM": TINY_FAMILIES["granite 4"]
    | {"shared_intermediate_size": 128, "mamba_n_heads": 8, "mamba_d_state": 16},
    "Qwen3NextForCausalLM": TINY_FAMILIES["qwen3 next"]
    | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "linear_value_head_dim": 32},
    "Qwen3_5ForConditionalGeneration": TINY_FAMILIES["qwen3.5"] | {"linear_value_head_dim": 32},
    "Qwen3_5MoeForConditionalGeneration": TINY_FAMILIES["qwen3.5 moe"]
    | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "linear_value_head_dim": 32},
    "GptOssForCausalLM": TINY_FAMILIES["gpt oss"],
    "Glm4MoeLiteForCausalLM": TINY_FAMILIES["glm 4.7 flash"] | LATENT_IN_RUNS,
    "Glm4MoeForCausalLM": TINY_FAMILIES["glm 4.5"] | {"moe_intermediate_size": 128},
}

Write = Callable[[Path, TinyCheckpoint], tuple[Path, TinyCheckpoint]]


def unchanged(target: LoadedTarget) -> LoadedTarget:
    """The target as it was loaded."""
    return target


@dataclass(frozen=True)
class TinyFormat:
    """`write` returns the path to load, and the checkpoint as the format leaves it, which drafts are made for.

    `flags`: of the engine. `shape`: of the target, where rows must fill whole blocks. `convert`: after loading.
    """

    write: Write
    flags: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)
    convert: Callable[[LoadedTarget], LoadedTarget] = unchanged
    dtype_on_gpu: torch.dtype = torch.float32  # that of its kernels

    def checkpoint(self, architecture: str, seed: int) -> TinyCheckpoint:
        """A random target of this architecture."""
        return tiny_target(seed, **ARCHITECTURES[architecture], **self.shape)


def _as_it_is(directory: Path, checkpoint: TinyCheckpoint) -> tuple[Path, TinyCheckpoint]:
    return write_checkpoint(directory, checkpoint), checkpoint


PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NOT_READ: dict[str, dict[str, Any]] = {  # what tells them in a .gguf file
    "MiMoForCausalLM": {"architecture": "mimo"},
    "Gemma4ForCausalLM": {"architecture": "gemma4"},
    "Gemma4ForConditionalGeneration": {"architecture": "gemma4"},
    "Olmo2ForCausalLM": {"architecture": "olmo2"},
    "Phi3ForCausalLM": {"architecture": "phi3"},
    "Qwen3MoeForCausalLM": {"architecture": "qwen3moe"},
    "MixtralForCausalLM": {"llama__expert_count": 8},
    "DeepseekV2ForCausalLM": {"architecture": "deepseek2"},
    "DeepseekV3ForCausalLM": {"architecture": "deepseek2"},
    "MiMoV2FlashForCausalLM": {"architecture": "mimo2"},
    "Step3p5ForCausalLM": {"architecture": "step35"},
    "GraniteMoeHybridForCausalLM": {"architecture": "granitehybrid"},
    "Qwen3NextForCausalLM": {"architecture": "qwen3next"},
    "Qwen3_5ForConditionalGeneration": {"architecture": "qwen35"},
    "Qwen3_5MoeForConditionalGeneration": {"architecture": "qwen35moe"},
    "GptOssForCausalLM": {"architecture": "gpt-oss"},
    "Glm4MoeLiteForCausalLM": {"architecture": "deepseek2"},
    "Glm4MoeForCausalLM": {"architecture": "glm4moe"},
}


def _as_gguf(kind: Any, directory: Path, checkpoint: TinyCheckpoint) -> tuple[Path, TinyCheckpoint]:
    """A Mistral becomes a llama, as llama.cpp converts it. Of what is not read, only what tells them matters."""
    name, path = checkpoint.config["architectures"][0], directory / "tiny.gguf"
    types = dict.fromkeys(PARTS, kind)
    if name in NOT_READ:
        write_gguf(path, tiny_target(1, hidden=256), types, **NOT_READ[name])
        return path, checkpoint
    if name == "MistralForCausalLM":
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "sliding_window": None}
        checkpoint = TinyCheckpoint(checkpoint.config | llama, checkpoint.tensors)
    return path, write_gguf(path, checkpoint, types)


def _gguf(kind: Any, **shape: int) -> TinyFormat:
    return TinyFormat(partial(_as_gguf, kind), shape=shape)


def _as_quantised(kind: str, directory: Path, checkpoint: TinyCheckpoint) -> tuple[Path, TinyCheckpoint]:
    stored, meant = quantised(checkpoint, kind)
    return write_checkpoint(directory, stored), meant


IN_RUNS = {"hidden": 128}  # rows of whole groups
WHOLE_BLOCKS = {"hidden": 256}  # rows of 256 values and more
FORMATS: dict[str, TinyFormat] = {
    "float": TinyFormat(_as_it_is),
    **{
        kind: TinyFormat(partial(_as_quantised, kind), shape=IN_RUNS, dtype_on_gpu=torch.bfloat16) for kind in QUANTISED
    },
    "fp8 while loading": TinyFormat(
        _as_it_is, flags={"quantization": "fp8"}, shape=IN_RUNS, dtype_on_gpu=torch.bfloat16
    ),
    **{f"GGUF {kind.name}": _gguf(kind) for kind in (KIND.Q4_0, KIND.Q4_1, KIND.Q5_0, KIND.Q5_1, KIND.Q8_0)},
    **{
        f"GGUF {kind.name}": _gguf(kind, **WHOLE_BLOCKS)
        for kind in (KIND.Q2_K, KIND.Q3_K, KIND.Q4_K, KIND.Q5_K, KIND.Q6_K)
    },
    "int8 toy": TinyFormat(_as_it_is, convert=with_int8_linears),
}
