"""Mixtures of experts that are wrong in one way each, and what is said of them, as in `bad_checkpoints`."""

import torch

from support.bad_checkpoints import FP8, Spoil, configured, with_tensors, without
from support.tiny.families import TINY_FAMILIES
from support.tiny.layouts import fused_experts
from support.tiny.models import TinyCheckpoint, tiny_target
from support.tiny.quantized import MXFP4, in_mxfp4, quantised


def mixture(spoil: Spoil, family: str = "qwen3 moe", fused: bool = False) -> Spoil:
    """A mixture in the place of the given target, spoilt."""

    def spoilt(given: TinyCheckpoint) -> TinyCheckpoint:
        found = tiny_target(6, **TINY_FAMILIES[family])
        return spoil(TinyCheckpoint(found.config, fused_experts(found.tensors)) if fused else found)

    return spoilt


def latent(spoil: Spoil) -> Spoil:
    """A DeepSeek-V3 in the place of the given target, spoilt."""
    return mixture(spoil, "deepseek v3")


def narrow(spoil: Spoil) -> Spoil:
    """A MiMo-V2-Flash in the place of the given target, spoilt."""
    return mixture(spoil, "mimo v2 flash")


def gated(spoil: Spoil) -> Spoil:
    """A Step-3.5-Flash in the place of the given target, spoilt."""
    return mixture(spoil, "step 3.5")


def _fused_in_8_bits() -> TinyCheckpoint:
    """All but the experts, which the config does not leave out."""
    stored, _ = quantised(tiny_target(6, **TINY_FAMILIES["qwen3 moe"]), "fp8 by row", kept=("experts",))
    named = stored.config["quantization_config"] | {"ignore": ["lm_head"]}
    return TinyCheckpoint(stored.config | {"quantization_config": named}, fused_experts(stored.tensors))


def random_gpt_oss() -> TinyCheckpoint:
    """Of sizes that blocks of 32 fill."""
    return tiny_target(6, **TINY_FAMILIES["gpt oss"] | {"hidden": 64, "intermediate_size": 96})


def mxfp4(spoil: Spoil) -> Spoil:
    """A gpt-oss as it is published, in the place of the given target, spoilt."""
    return lambda given: spoil(in_mxfp4(random_gpt_oss())[0])


EXPERTS = "model.layers.1.mlp.experts"
MIXTURE_ERRORS: dict[str, tuple[Spoil, str]] = {
    "a router of fewer experts": (
        mixture(with_tensors(model__layers__1__mlp__gate__weight=torch.zeros(6, 32))),
        r"model\.safetensors: tensor model\.layers\.1\.mlp\.gate\.weight: found shape \[6, 32\], expected \[8, 32\]",
    ),
    "no router": (
        mixture(without("model.layers.1.mlp.gate.weight")),
        r"layers\.1\.mlp\.gate\.weight is missing, expected shape \[8, 32\]",
    ),
    "an expert is missing": (
        mixture(without(f"{EXPERTS}.7.up_proj.weight")),
        r"tensor layers\.1\.mlp\.experts\.7\.up_proj\.weight is missing, expected shape \[24, 32\]",
    ),
    "an expert of another size": (
        mixture(with_tensors(**{f"{EXPERTS}.3.down_proj.weight": torch.zeros(32, 25)})),
        r"experts\.3\.down_proj\.weight: found shape \[32, 25\], expected \[32, 24\]",
    ),
    "an expert too many": (
        mixture(with_tensors(**{f"{EXPERTS}.8.down_proj.weight": torch.zeros(32, 24)})),
        r"model\.safetensors: unexpected tensor model\.layers\.1\.mlp\.experts\.8\.down_proj\.weight",
    ),
    "fewer experts than the router has": (
        mixture(with_tensors(**{f"{EXPERTS}.down_proj": torch.zeros(7, 32, 24)}), fused=True),
        r"tensor model\.layers\.1\.mlp\.experts\.down_proj: found shape \[7, 32, 24\], expected \[8, 32, 24\]",
    ),
    "half of the experts' linears": (
        mixture(without(f"{EXPERTS}.gate_up_proj"), fused=True),
        r"layers\.1\.mlp\.experts\.gate_up_proj is missing, expected shape \[8, 48, 32\]",
    ),
    "a mixtral without an expert": (
        mixture(without("model.layers.0.block_sparse_moe.experts.3.w3.weight"), "mixtral"),
        r"tensor layers\.0\.block_sparse_moe\.experts\.3\.w3\.weight is missing, expected shape \[64, 32\]",
    ),
    "more of a row's experts than there are": (
        mixture(configured(num_experts_per_tok=9)),
        r"config\.json: num_experts_per_tok: found 9, expected at most num_experts 8",
    ),
    "more of a mixtral's experts": (
        mixture(configured(num_experts_per_tok=5), "mixtral"),
        r"config\.json: num_experts_per_tok: found 5, expected at most num_local_experts 4",
    ),
    "no number of experts": (
        mixture(configured(num_experts=None)),
        "num_local_experts must be a positive integer, it is missing",
    ),
    "an unknown scoring": (
        mixture(configured(scoring_func="sigmoid")),
        "scoring_func 'sigmoid' is not supported; expected 'softmax'",
    ),
    "a dense layer that is not there": (
        mixture(configured(mlp_only_layers=[2])),
        r"mlp_only_layers: found \[2\], expected indices of 2 layers",
    ),
    "dense layers that are no list": (mixture(configured(mlp_only_layers="0")), "mlp_only_layers: found '0', expected"),
    "no step": (mixture(configured(decoder_sparse_step=0)), "decoder_sparse_step must be a positive integer, found 0"),
    "an unknown function of scores": (
        latent(configured(scoring_func="tanh")),
        r"config\.json: scoring_func 'tanh' is not supported; expected 'sigmoid'",
    ),
    "groups that do not divide": (
        latent(configured(n_group=3)),
        r"config\.json: n_group: found 3 groups of n_routed_experts 8, expected groups of equal size, of 2 or more",
    ),
    "groups of one expert": (
        latent(configured(n_group=8)),
        r"n_group: found 8 groups of n_routed_experts 8, expected groups of equal size, of 2 or more",
    ),
    "more groups than there are": (
        latent(configured(topk_group=5)),
        r"topk_group: found 5 of 4 groups of 2 experts, expected as many as a row's 3 experts need, and no more than",
    ),
    "too few groups for a row": (
        latent(configured(topk_group=1)),
        r"topk_group: found 1 of 4 groups of 2 experts, expected as many as a row's 3 experts need",
    ),
    "no correction": (
        latent(without("model.layers.1.mlp.gate.e_score_correction_bias")),
        r"tensor layers\.1\.mlp\.gate\.e_score_correction_bias is missing, expected shape \[8\]",
    ),
    "a correction of other experts": (
        latent(with_tensors(model__layers__1__mlp__gate__e_score_correction_bias=torch.zeros(7))),
        r"e_score_correction_bias: found shape \[7\], expected \[8\]",
    ),
    "no shared expert": (
        latent(without("model.layers.1.mlp.shared_experts.up_proj.weight")),
        r"tensor layers\.1\.mlp\.shared_experts\.up_proj\.weight is missing, expected shape \[24, 32\]",
    ),
    "another way to choose experts": (
        latent(configured(topk_method="greedy")),
        r"topk_method 'greedy' is not supported; expected 'noaux_tc'",
    ),
    "a pattern of other layers": (
        narrow(configured(hybrid_layer_pattern=[0, 1, 1])),
        r"config\.json: hybrid_layer_pattern must be 2 times 0 or 1",
    ),
    "layers with experts that are no list": (
        narrow(configured(moe_layer_freq=1)),
        r"config\.json: moe_layer_freq must be 2 times 0 or 1",
    ),
    "values wider than keys": (
        narrow(configured(v_head_dim=26)),
        r"config\.json: v_head_dim: found 26, expected at most head_dim 24",
    ),
    "heads that do not fit one cache": (
        narrow(configured(swa_num_key_value_heads=3)),
        r"config\.json: num_key_value_heads: found 2 for 8 heads, expected that they divide 3, which one cache holds"
        r" for all layers, and that 3 divide 8",
    ),
    "keys of two sizes": (
        narrow(configured(swa_head_dim=32)),
        "swa_head_dim 32 is not supported; expected 24",
    ),
    "stretched positions over part of a head": (
        narrow(configured(rope_parameters=None, rope_scaling={"type": "yarn", "factor": 4.0})),
        "rope type 'yarn' .*over part of a head",
    ),
    "positions that are not by kind of layer": (
        narrow(configured(rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
        "rope_parameters must be objects for 'full_attention' and 'sliding_attention'",
    ),
    "a part of a head that is no pairs": (
        narrow(configured(rope_parameters=None, partial_rotary_factor=0.3)),
        "partial_rotary_factor rotates 7 of 24: expected pairs",
    ),
    "an expert that all rows share in MiMo-V2": (
        narrow(configured(n_shared_experts=1)),
        "n_shared_experts 1 is not supported; expected 0",
    ),
    "no sinks in MiMo-V2": (
        narrow(without("model.layers.1.self_attn.attention_sink_bias")),
        r"tensor layers\.1\.self_attn\.attention_sink_bias is missing, expected shape \[8\]",
    ),
    "sinks in a full layer": (
        narrow(with_tensors(model__layers__0__self_attn__attention_sink_bias=torch.zeros(8))),
        r"unexpected tensor model\.layers\.0\.self_attn\.attention_sink_bias",
    ),
    "sinks that are no yes or no": (
        narrow(configured(add_swa_attention_sink_bias="always")),
        "add_swa_attention_sink_bias must be true or false, found 'always'",
    ),
    "values as wide as keys": (
        narrow(with_tensors(model__layers__1__self_attn__v_proj__weight=torch.zeros(96, 32))),
        r"layers\.1\.self_attn\.v_proj\.weight: found shape \[96, 32\], expected \[64, 32\]",
    ),
    "kinds of too few layers": (
        gated(configured(layer_types=["full_attention"])),
        r"config\.json: layer_types must have 'full_attention' or 'sliding_attention' for each of 2 layers",
    ),
    "bases of too few layers": (
        gated(configured(rope_theta=[1e4])),
        r"config\.json: rope_theta must have an entry for each of 2 layers, found \[10000\.0\]",
    ),
    "a base that is too small": (
        gated(configured(rope_theta=[0.5] * 8)),
        "rope_theta must be a finite number above 1, or a list of such, found",
    ),
    "bases of layers in Mixtral": (
        mixture(configured(rope_theta=[1e4, 1e4]), "mixtral"),
        r"config\.json: rope_theta must be a number, found a list of 2",
    ),
    "layers with experts that are no numbers": (
        gated(configured(moe_layers_enum="1,b")),
        r"moe_layers_enum: found '1,b', expected indices of 2 layers, between commas",
    ),
    "bounds of too few layers": (
        gated(configured(swiglu_limits=[7.0])),
        r"config\.json: swiglu_limits must have an entry for each of 2 layers, found \[7\.0\]",
    ),
    "more than a head": (
        gated(configured(partial_rotary_factors=[1.5] * 8)),
        r"config\.json: partial_rotary_factors must be a list of which each is a number above 0, up to 1, found \[1\.5",
    ),
    "a setting of windows that is a list": (
        gated(configured(attention_other_setting=[6])),
        r"config\.json: attention_other_setting must be null or an object, found \[6\]",
    ),
    "experts in layers that there are not": (
        gated(configured(moe_layers_enum="1,2")),
        r"moe_layers_enum: found '1,2', expected indices of 2 layers",
    ),
    "bounds that are words": (
        gated(configured(swiglu_limits=["none"] * 8)),
        "swiglu_limits must be a list of which each is null or a finite number from 0, found",
    ),
    "groups that do not divide heads": (
        gated(configured(attention_other_setting={"num_attention_heads": 5})),
        "num_attention_groups: found 2, expected a divisor of 5 heads of sliding_attention",
    ),
    "other groups where there is a window": (
        gated(configured(attention_other_setting={"num_attention_groups": 4})),
        "attention_other_setting: num_attention_groups 4 is not supported; expected 2",
    ),
    "keys of two sizes in Step-3.5": (
        gated(configured(attention_other_setting={"head_dim": 32})),
        "attention_other_setting: head_dim 32 is not supported; expected 16",
    ),
    "parts of heads that are no pairs": (
        gated(configured(partial_rotary_factors=[0.1] * 8)),
        "partial_rotary_factor rotates 1 of 16: expected pairs",
    ),
    "more experts than there are in Step-3.5": (
        gated(configured(moe_top_k=9)),
        "moe_top_k: found 9, expected at most moe_num_experts 8",
    ),
    "heads without gates": (
        gated(configured(use_head_wise_attn_gate=False)),
        "use_head_wise_attn_gate False is not supported; expected True",
    ),
    "no gates": (
        gated(without("model.layers.1.self_attn.g_proj.weight")),
        r"tensor layers\.1\.self_attn\.g_proj\.weight is missing, expected shape \[6, 32\]",
    ),
    "a router's correction is missing": (
        gated(without("model.layers.1.moe.router_bias")),
        r"tensor layers\.1\.moe\.router_bias is missing, expected shape \[8\]",
    ),
    "experts of another size in Step-3.5": (
        gated(with_tensors(model__layers__1__moe__down_proj__weight=torch.zeros(8, 32, 23))),
        r"moe\.down_proj\.weight: found shape \[8, 32, 23\], expected \[8, 32, 24\]",
    ),
    "no rank of latents": (
        latent(configured(kv_lora_rank=0)),
        "kv_lora_rank must be a positive integer, found 0",
    ),
    "latents of another rank": (
        latent(configured(kv_lora_rank=25)),
        r"self_attn\.kv_a_proj_with_mqa\.weight: found shape \[40, 32\], expected \[41, 32\]",
    ),
    "an odd part of a head that is rotated": (
        latent(configured(qk_rope_head_dim=15)),
        r"config\.json: qk_rope_head_dim: found 15, expected an even number",
    ),
    "latents of fewer heads": (
        latent(configured(num_key_value_heads=2)),
        "num_key_value_heads 2 is not supported; expected 4",
    ),
    "biases beside latents": (
        latent(configured(attention_bias=True)),
        "attention_bias True is not supported; expected False",
    ),
    "dense layers that are no number": (
        latent(configured(first_k_dense_replace=-1)),
        "first_k_dense_replace must be an integer from 0 to 4096, found -1",
    ),
    "weights that add up to 1 in DeepSeek-V2": (
        mixture(configured(norm_topk_prob=True), "deepseek v2 lite"),
        "norm_topk_prob True is not supported; expected False",
    ),
    "kinds of fewer layers": (
        mixture(configured(mlp_layer_types=["dense"]), "glm 4.7 flash"),
        r"config\.json: mlp_layer_types must be 2 times 'dense' or 'sparse'",
    ),
    "a glm without a correction": (
        mixture(without("model.layers.1.mlp.gate.e_score_correction_bias"), "glm 4.5"),
        r"tensor layers\.1\.mlp\.gate\.e_score_correction_bias is missing, expected shape \[8\]",
    ),
    "a glm router of fewer experts": (
        mixture(with_tensors(model__layers__1__mlp__gate__weight=torch.zeros(6, 32)), "glm 4.5"),
        r"tensor model\.layers\.1\.mlp\.gate\.weight: found shape \[6, 32\], expected \[8, 32\]",
    ),
    "a glm of dense layers": (
        mixture(configured(first_k_dense_replace=2), "glm 4.5"),
        r"tensor layers\.1\.mlp\.gate_proj\.weight is missing, expected shape \[64, 32\]",
    ),
    "a glm without biases": (
        mixture(without("model.layers.1.self_attn.k_proj.bias"), "glm 4.5"),
        r"tensor layers\.1\.self_attn\.k_proj\.bias is missing, expected shape \[32\]",
    ),
    "a glm with a bias of outputs": (
        mixture(with_tensors(model__layers__1__self_attn__o_proj__bias=torch.zeros(32)), "glm 4.5"),
        r"model\.safetensors: unexpected tensor model\.layers\.1\.self_attn\.o_proj\.bias",
    ),
    "a glm without norms of heads": (
        mixture(without("model.layers.0.self_attn.q_norm.weight"), "glm 4.5"),
        r"tensor layers\.0\.self_attn\.q_norm\.weight is missing, expected shape \[16\]",
    ),
    "norms of heads that a glm does not ask for": (
        mixture(configured(use_qk_norm=False), "glm 4.5"),
        r"unexpected tensor model\.layers\.0\.self_attn\.k_norm\.weight",
    ),
    "a glm with an odd part of a head": (
        mixture(configured(partial_rotary_factor=0.2), "glm 4.5"),
        r"config\.json: partial_rotary_factor rotates 3 of 16: expected pairs",
    ),
    "a glm with yarn over a part of a head": (
        mixture(configured(rope_scaling={"type": "yarn", "factor": 4.0}), "glm 4.5"),
        r"config\.json: rope type 'yarn' over part of a head is not supported",
    ),
    "another function of a glm's scores": (
        mixture(configured(scoring_func="softmax"), "glm 4.5"),
        r"config\.json: scoring_func 'softmax' is not supported; expected 'sigmoid'",
    ),
    "more of a glm's experts": (
        mixture(configured(num_experts_per_tok=9), "glm 4.5"),
        r"config\.json: num_experts_per_tok: found 9, expected at most n_routed_experts 8",
    ),
    "a glm whose groups do not divide": (
        mixture(configured(n_group=3), "glm 4.5"),
        r"config\.json: n_group: found 3 groups of n_routed_experts 8, expected groups of equal size, of 2 or more",
    ),
    "a glm with a window": (
        mixture(configured(sliding_window=64), "glm 4.5"),
        r"config\.json: sliding_window 64 is not supported for this architecture",
    ),
    "an indexer": (
        latent(configured(index_topk=2048, architectures=["DeepseekV32ForCausalLM"])),
        r"DeepseekV32ForCausalLM has sparse attention by an indexer \(index_topk 2048\), which is not supported yet;"
        " the nearest one is DeepseekV3ForCausalLM",
    ),
    "a gpt-oss router of fewer experts": (
        mixture(with_tensors(model__layers__0__mlp__router__weight=torch.zeros(5, 32)), "gpt oss"),
        r"tensor model\.layers\.0\.mlp\.router\.weight: found shape \[5, 32\], expected \[6, 32\]",
    ),
    "a gpt-oss router without biases": (
        mixture(without("model.layers.0.mlp.router.bias"), "gpt oss"),
        r"tensor layers\.0\.mlp\.router\.bias is missing, expected shape \[6\]",
    ),
    "more of gpt-oss's experts": (
        mixture(configured(num_experts_per_tok=7), "gpt oss"),
        r"config\.json: num_experts_per_tok: found 7, expected at most num_local_experts 6",
    ),
    "other numbers of gpt-oss's experts": (
        mixture(configured(num_local_experts=8), "gpt oss"),
        r"tensor model\.layers\.0\.mlp\.router\.weight: found shape \[6, 32\], expected \[8, 32\]",
    ),
    "experts of a gpt-oss without biases": (
        mixture(without(f"{EXPERTS}.down_proj_bias"), "gpt oss"),
        r"tensor layers\.1\.mlp\.experts\.down_proj_bias is missing, expected shape \[6, 32\]",
    ),
    "experts of a gpt-oss that lie as linears do": (
        mixture(with_tensors(**{f"{EXPERTS}.gate_up_proj": torch.zeros(6, 72, 32)}), "gpt oss"),
        r"experts\.gate_up_proj: found shape \[6, 72, 32\], expected \[6, 32, 72\]",
    ),
    "no sinks": (
        mixture(without("model.layers.1.self_attn.sinks"), "gpt oss"),
        r"tensor layers\.1\.self_attn\.sinks is missing, expected shape \[4\]",
    ),
    "another bound": (
        mixture(configured(swiglu_limit=5.0), "gpt oss"),
        r"config\.json: swiglu_limit 5\.0 is not supported; expected 7\.0",
    ),
    "mxfp4 without scales": (
        mxfp4(without(f"{EXPERTS}.down_proj_scales")),
        r"tensor layers\.1\.mlp\.experts\.down_proj_scales is missing, expected shape \[6, 64, 3\]",
    ),
    "scales of other blocks": (
        mxfp4(with_tensors(**{f"{EXPERTS}.down_proj_scales": torch.zeros(6, 64, 6, dtype=torch.uint8)})),
        r"experts\.down_proj_scales: found shape \[6, 64, 6\], expected \[6, 64, 3\]",
    ),
    "blocks of bytes with signs": (
        mxfp4(with_tensors(**{f"{EXPERTS}.down_proj_blocks": torch.zeros(6, 64, 3, 16, dtype=torch.int8)})),
        r"experts\.down_proj_blocks: found type int8, expected uint8: the config names mxfp4 weights",
    ),
    "experts in 16 bits where mxfp4 is named": (
        mxfp4(lambda c: TinyCheckpoint(c.config, random_gpt_oss().tensors)),
        r"tensor layers\.0\.mlp\.experts\.gate_up_proj_blocks is missing, expected shape \[6, 192, 2, 16\]",
    ),
    "mxfp4 where no format is named": (
        mxfp4(configured(quantization_config=None)),
        r"tensor layers\.0\.mlp\.experts\.gate_up_proj is missing, expected shape \[6, 64, 192\]",
    ),
    "columns that are no blocks": (
        lambda c: configured(quantization_config=MXFP4)(tiny_target(6, **TINY_FAMILIES["gpt oss"] | {"hidden": 40})),
        r"mlp\.experts\.gate_up_proj has 40 columns, which are no groups of 32",
    ),
    "scales that are NaN": (
        mxfp4(with_tensors(**{f"{EXPERTS}.down_proj_scales": torch.full((6, 64, 3), 255, dtype=torch.uint8)})),
        r"tensor layers\.1\.mlp\.experts\.down_proj_scales: found 1152 scales that are NaN, expected finite ones",
    ),
    "gpt-oss in 8 bits": (
        mixture(configured(quantization_config=FP8), "gpt oss"),
        r"self_attn\.q_proj\.weight: found type float64, expected float8_e4m3fn",
    ),
    "experts of a gpt-oss in 8 bits": (
        mixture(
            configured(quantization_config=FP8 | {"ignored_layers": ["self_attn", "lm_head", "router"]}), "gpt oss"
        ),
        r"experts\.gate_up_proj: experts in one tensor are not supported as fp8 \(e4m3\) weights; expected mxfp4,",
    ),
    "experts in one tensor in few bits": (
        lambda c: _fused_in_8_bits(),
        r"layers\.1\.mlp\.experts: experts in one tensor are not supported as fp8 \(e4m3\) weights",
    ),
}
