"""Tiny checkpoints in the layouts of published formats, and the same weights dequantised, in float64.

Layouts are written out here from their definitions, word by word, and share no code with the loader.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.tiny.models import TinyCheckpoint

SIZES = {"hidden": 64}  # columns in whole runs
IN_BLOCKS = {"hidden": 128}
# As `tiny_loaded` knows them: a family, its format, and sizes that fit it.
FAMILIES_IN_FORMATS: dict[str, tuple[str, str, dict[str, int]]] = {
    "llama in fp8": ("llama", "fp8 by row", SIZES),
    "llama in int4": ("llama", "awq", SIZES),
    "llama in nvfp4": ("llama", "nvfp4", SIZES),
    "qwen3 moe in nvfp4": ("qwen3 moe", "nvfp4, modelopt", IN_BLOCKS | {"moe_intermediate_size": 128}),
    "mixtral in mxfp4": ("mixtral", "mxfp4", IN_BLOCKS),
    "qwen3 moe in fp8": ("qwen3 moe", "fp8 by block", IN_BLOCKS | {"moe_intermediate_size": 128}),
    "mixtral in int4": ("mixtral", "awq", IN_BLOCKS),
    "gpt oss in mxfp4": ("gpt oss", "mxfp4 of gpt-oss", SIZES | {"intermediate_size": 64}),
    "deepseek v3 in fp8": (
        "deepseek v3",
        "fp8 by block",
        IN_BLOCKS | {"moe_intermediate_size": 128, "q_lora_rank": 128, "v_head_dim": 32},
    ),
}
Quantised = tuple[dict[str, Tensor], Tensor]  # tensors of a linear by the end of their names, the weight that they mean
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
LINEARS += ("w1", "w2", "w3")  # of Mixtral's experts
LINEARS += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # of latent attention
LINEARS += ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj", "out_proj")  # of layers that recur
LINEARS += ("input_linear", "output_linear")  # of Granite's MLPs
LINEARS += ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection")  # of small Gemma 4
IN_16_BITS = (".in_proj_ba.weight", ".in_proj_b.weight", ".in_proj_a.weight")  # theirs that stay so in published files
E4M3 = torch.float8_e4m3fn
FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)  # floats without a sign, by their bits


def quantised(
    checkpoint: TinyCheckpoint, kind: str, kept: tuple[str, ...] = ()
) -> tuple[TinyCheckpoint, TinyCheckpoint]:
    """In the layout of `FORMATS[kind]`, and dequantised. `kept`: linears whose names hold one of these stay.

    So do those of several experts in one tensor, which no loader reads in few bits.
    """
    if kind == "mxfp4 of gpt-oss":
        return in_mxfp4(checkpoint)
    config, convert = FORMATS[kind]
    stored, plain = dict(checkpoint.tensors), dict(checkpoint.tensors)
    for name, weight in checkpoint.tensors.items():
        if weight.dim() > 2:
            continue
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in LINEARS and stem != name and not any(part in name for part in kept):
            del stored[name]
            tensors, plain[name] = convert(weight)
            stored |= {f"{stem}.{end}": tensor for end, tensor in tensors.items()}
    of_gates = [name.removesuffix(".weight") for name in stored if name.endswith(IN_16_BITS)]
    ignored = ["lm_head", *(f"re:.*{part}" for part in kept), *of_gates]
    told = {"ignore": ignored, "modules_to_not_convert": ignored} if of_gates else {"ignore": ignored} if kept else {}
    named = {"quantization_config": config | told}
    return TinyCheckpoint(checkpoint.config | named, stored), TinyCheckpoint(checkpoint.config, plain)


def _float8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    stored = (weight / scale.double()).clamp(-448, 448).float().to(E4M3)
    return stored, stored.double() * scale.double()


def _by_tensor(weight: Tensor) -> Quantised:
    scale = (weight.abs().max() / 448).float()
    stored, meant = _float8(weight, scale)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, meant


def _by_row(weight: Tensor) -> Quantised:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    stored, meant = _float8(weight, scale)
    return {"weight": stored, "weight_scale": scale}, meant


def _by_block(weight: Tensor) -> Quantised:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scale, meant, stored = torch.zeros(rows, columns), torch.zeros_like(weight), torch.zeros(weight.shape, dtype=E4M3)
    for i in range(rows):
        for j in range(columns):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = weight[block].abs().max() / 448
            stored[block], meant[block] = _float8(weight[block], scale[i, j])
    return {"weight": stored, "weight_scale_inv": scale}, meant


def _groups(weight: Tensor, size: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values 0..15 [O, I], scales and zero points [O, groups], and what they mean."""
    parts = weight.unflatten(1, (-1, size))
    if symmetric:
        scales = (parts.abs().amax(2) / 7.5).to(dtype)
        zeros = torch.full_like(scales, 8, dtype=torch.int64)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / 15).to(dtype)
        zeros = (-low / scales.double()).round().long().clamp(1, 15)
    wide = scales.double()[..., None]
    values = (parts / wide).round().long().add(zeros[..., None]).clamp(0, 15)
    return values.flatten(1), scales, zeros, ((values - zeros[..., None]) * wide).flatten(1)


def _words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight values of the last dimension in a word, `order[i]` at bits 4 i. Shapes: [n, 8 m] i64 -> [n, m] i32."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for i, column in enumerate(order):
        words |= values[:, column::8] << 4 * i
    return words.where(words < 1 << 31, words - (1 << 32)).int()


def _awq(size: int) -> Callable[[Tensor], Quantised]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def convert(weight: Tensor) -> Quantised:
        values, scales, zeros, meant = _groups(weight, size, False, torch.float16)
        words = {"qweight": _words(values.t(), order), "qzeros": _words(zeros.t(), order)}
        return words | {"scales": scales.t().contiguous()}, meant

    return convert


def _gptq(size: int, symmetric: bool, less: int) -> Callable[[Tensor], Quantised]:
    def convert(weight: Tensor) -> Quantised:
        width = weight.shape[1] if size == -1 else size
        values, scales, zeros, meant = _groups(weight, width, symmetric, torch.float16)
        order = torch.arange(weight.shape[1], dtype=torch.int32) // width
        words = {"qweight": _words(values).t().contiguous(), "qzeros": _words(zeros.t() - less)}
        return words | {"scales": scales.t().contiguous(), "g_idx": order}, meant

    return convert


def _packed(size: int, symmetric: bool) -> Callable[[Tensor], Quantised]:
    def convert(weight: Tensor) -> Quantised:
        values, scales, zeros, meant = _groups(weight, size, symmetric, torch.bfloat16)
        found = {"weight_packed": _words(values), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        return found | ({} if symmetric else {"weight_zero_point": _words(zeros.t()).t().contiguous()}), meant

    return convert


def _nearest(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest 4-bit floats, two in a byte, the first in the lower bits, and what they are. Shapes: [O, I]."""
    nearest = (scaled.abs()[..., None] - FOUR_BITS).abs().argmin(-1)
    bits = nearest + 8 * (scaled < 0)
    return (bits[..., 0::2] + 16 * bits[..., 1::2]).to(torch.uint8), FOUR_BITS[nearest] * scaled.sign()


def _in_float4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values in groups of 16, scales, the factor of the tensor in float32, and what they mean, without that."""
    factor = (weight.abs().max() / (6 * 448)).float()
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6 / factor.double()).float().clamp(2**-9, 448).to(E4M3)
    wide = scales.double().repeat_interleave(16, dim=1)
    pairs, values = _nearest(weight / wide / factor.double())
    return pairs, scales, factor, values * wide


def _nvfp4(weight: Tensor) -> Quantised:
    pairs, scales, factor, meant = _in_float4(weight)
    divisor = (1 / factor).reshape(1)
    found = {"weight_packed": pairs, "weight_scale": scales, "weight_global_scale": divisor}
    return found | {"input_global_scale": torch.tensor([300.0])}, meant * (1 / divisor).double()


def _modelopt(weight: Tensor) -> Quantised:
    pairs, scales, factor, meant = _in_float4(weight)
    found = {"weight": pairs, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.tensor(0.01)}
    return found, meant * factor.double()


def _mxfp4(weight: Tensor) -> Quantised:
    blocks, scales, meant = _blocks(weight[None])
    return {"weight_packed": blocks[0].flatten(1), "weight_scale": scales[0]}, meant[0]


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _int4(size: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": symmetric}
    return _compressed("pack-quantized", weights)


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC = FLOAT | {"strategy": "token", "dynamic": True}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
NVFP4 = FLOAT4 | {"strategy": "tensor_group", "group_size": 16}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantised]]] = {
    "fp8 by tensor": (
        _compressed("float-quantized", FLOAT | {"strategy": "tensor"}, FLOAT | {"strategy": "tensor"}),
        _by_tensor,
    ),
    "fp8 by row": (_compressed("float-quantized", FLOAT | {"strategy": "channel"}, DYNAMIC), _by_row),
    "fp8 by block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        _by_block,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, _awq(32)),
    "gptq": (GPTQ | {"group_size": 64, "sym": False}, _gptq(64, False, 1)),
    "gptq, symmetric rows": (GPTQ | {"group_size": -1, "sym": True}, _gptq(-1, True, 1)),
    "gptq, version 2": (GPTQ | {"group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}, _gptq(32, False, 0)),
    "int4": (_int4(128, True), _packed(128, True)),
    "int4 with zero points": (_int4(32, False), _packed(32, False)),
    "nvfp4": (_compressed("nvfp4-pack-quantized", NVFP4, NVFP4 | {"dynamic": "local"}), _nvfp4),
    "nvfp4, modelopt": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
            },
        },
        _modelopt,
    ),
    "mxfp4": (_compressed("mxfp4-pack-quantized", FLOAT4 | {"strategy": "group", "group_size": 32}), _mxfp4),
}


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def in_mxfp4(checkpoint: TinyCheckpoint) -> tuple[TinyCheckpoint, TinyCheckpoint]:
    """A gpt-oss as it is published, whose experts are blocks of 32 floats of 4 bits; and what they mean, transposed."""
    stored, meant = dict(checkpoint.tensors), dict(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            del stored[name]
            stored[f"{name}_blocks"], stored[f"{name}_scales"], weight = _blocks(tensor.transpose(1, 2))
            meant[name] = weight.transpose(1, 2).contiguous()
    config = checkpoint.config | {"quantization_config": MXFP4}
    return TinyCheckpoint(config, stored), TinyCheckpoint(checkpoint.config, meant)


def _blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes: [E, O, I] -> [E, O, I / 32, 16] u8, [E, O, I / 32] u8, [E, O, I]."""
    groups = weight.unflatten(2, (-1, 32))
    exponents = groups.abs().amax(3).log2().floor() - 2  # the largest value becomes 4 to 8
    scaled = groups / exponents.exp2()[..., None]
    blocks, values = _nearest(scaled)
    return blocks, (exponents + 127).to(torch.uint8), (values * exponents.exp2()[..., None]).flatten(2)
