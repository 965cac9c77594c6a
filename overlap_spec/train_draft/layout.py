"""A trained draft's config.json, in the layouts that SpecForge writes, so that other engines load it too.

EAGLE-3: `LlamaForCausalLMEagle3` with `midlayer.*`, `d2t` and `t2d`. DFlash: `DFlashDraftModel` with Qwen3's layers.
Embedding and, for DFlash, the head are the target's and not in the file. Layer ids name outputs: 0 is the residual
after the first layer.
"""

from collections.abc import Mapping
from typing import Any

from overlap_spec.config.speculation import DraftKind
from overlap_spec.errors import CheckpointError
from overlap_spec.models.targets.llama import LlamaConfig
from overlap_spec.train_draft.head import Frozen

NUM_AUX = 3
COMMON = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "rms_norm_eps", "vocab_size")
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def draft_config(target: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that a draft layer takes from its target's config.json. Multimodal ones keep them one level down."""
    text = target.get("text_config") or target
    taken = {key: text[key] for key in (*SIZES, *COMMON, *ROPE) if text.get(key) is not None}
    taken.setdefault("rms_norm_eps", 1e-6)
    return taken | {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}


def layer_numbers(target: Mapping[str, Any], origin: str) -> LlamaConfig:
    """The draft layer that goes with a target. Raises: CheckpointError if its config has no such numbers."""
    if target.get("kv_lora_rank") is not None:
        raise CheckpointError(
            f"{origin}: kv_lora_rank: found {target['kv_lora_rank']}, expected attention with keys of its own: no draft"
            " layer is known here for a target with latent attention"
        )
    config = draft_config(target) | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return LlamaConfig.from_hf(config, origin)


def aux_layers_of(num_layers: int, kind: DraftKind, num_draft_layers: int = 1) -> tuple[int, ...]:
    """The layers whose outputs a draft reads, ascending. EAGLE-3's are SGLang's, where the target has so many."""
    if kind is DraftKind.EAGLE_3:
        layers = (1, num_layers // 2 - 1, num_layers - 4)
        if layers[0] < layers[1] < layers[2]:
            return layers
        return tuple(sorted({0, (num_layers - 1) // 2, num_layers - 1}))
    count, first, last = min(num_draft_layers, num_layers), 1, num_layers - 3
    if last - first + 1 < count:
        first, last = 0, num_layers - 1
    return tuple(round(first + step * (last - first) / max(count - 1, 1)) for step in range(count))


def eagle3_config(frozen: Frozen, aux_layers: tuple[int, ...], vocab_size: int) -> dict[str, Any]:
    """With the layers that are read, as SGLang and vLLM look for it."""
    return _config(frozen, 1) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "mlp_bias": False,
        "draft_vocab_size": vocab_size,
        "target_hidden_size": frozen.target.hidden_size,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(aux_layers)},
    }


def dflash_config(
    frozen: Frozen, aux_layers: tuple[int, ...], num_layers: int, block_size: int, mask: int
) -> dict[str, Any]:
    """With block, mask and the layers that are read."""
    return _config(frozen, num_layers) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "layer_types": ["full_attention"] * num_layers,
        "num_target_layers": frozen.target.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(aux_layers)},
    }


def _config(frozen: Frozen, num_layers: int) -> dict[str, Any]:
    """What `LlamaConfig` was read from, with every size spelled out."""
    llama = frozen.llama
    return {
        **frozen.given,
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_attention_heads": llama.num_heads,
        "num_key_value_heads": llama.num_kv_heads,
        "head_dim": llama.head_dim,
        "vocab_size": frozen.target.vocab_size,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": llama.rms_norm_eps,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
