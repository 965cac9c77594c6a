"""Models of the Llama family: their numbers, read from a Hugging Face config, and their weights, from a checkpoint.

What this project cannot compute exactly is refused by name, before any weight is read. All are
Llama's decoder: embedding, pre-norm attention with rotary positions, gated SiLU, RMSNorm. What sets the cousins apart
is a table, `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.mtp_layouts import has_layer, is_draft_part
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import PreNormLayer, Projection, SelfAttention
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.mlp import MLP, GatedMLP
from overlap_spec.models.layers.norm import HeadNormLinear, Norm, RMSNorm
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import (
    finish,
    rotated_head,
    take_embedding,
    take_head,
    take_linear,
    take_mlp,
    take_qkv,
    with_kv_scales,
)
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.reading import FULL, SLIDING, ConfigReader

Windows = tuple[int | None, ...]  # by layer: how many keys a row sees, its own included; None: all of them


@dataclass(frozen=True, slots=True)
class AttentionBias:
    """Which linears of attention have a bias."""

    qkv: bool
    output: bool


def _never(config: Mapping[str, Any]) -> bool:
    return False


def _always(config: Mapping[str, Any]) -> bool:
    return True


def _where_asked(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_qk_norm", False))


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture departs from the others. Functions take the config, as it is in config.json."""

    attention_bias: Callable[[Mapping[str, Any]], AttentionBias]
    windows: Callable[[ConfigReader], Windows]  # one per layer
    mlp_bias: bool = False  # true: where the config asks for it
    head_norms: Callable[[Mapping[str, Any]], bool] = _never  # heads of q and k, each by itself, before rotation
    head_dim: int | None = None  # where the config names none; None: hidden size / heads
    sinks: bool = False  # every head has one
    rotated: float | None = None  # the part of a head, where the config does not say; None: always all of it


def family_of(config: Mapping[str, Any]) -> Family:
    """That of the first architecture that is known; `...Eagle` and `...Eagle3` heads have the layers of their own.

    Others are Llama's: most heads are, whatever their target.
    """
    names = (str(name).removesuffix("3").removesuffix("Eagle") for name in config.get("architectures") or ())
    return next((FAMILIES[name] for name in names if name in FAMILIES), FAMILIES["LlamaForCausalLM"])


def counted_experts(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The key that counts experts, and how many; None: there are no several."""
    return next(((key, count) for key in _EXPERTS if (count := config.get(key)) not in (None, 0, 1)), None)


def refuse_sparse(config: Mapping[str, Any], origin: str, is_mixture: bool, is_latent: bool) -> None:
    """`is_mixture`, `is_latent`: its family computes experts, or latent attention.

    Raises: CheckpointError naming model and key of what is not here.
    """
    name = ", ".join(map(str, config.get("architectures") or ())) or "a model without a name"
    if (chosen := config.get("index_topk")) is not None:
        raise CheckpointError(
            f"{origin}: {name} has sparse attention by an indexer (index_topk {chosen}), which is not supported yet"
        )
    if not is_mixture and (counted := counted_experts(config)) is not None:
        raise CheckpointError(
            f"{origin}: {name} is a mixture of experts ({counted[0]} {counted[1]}), which is not supported yet"
        )
    if (rank := config.get("kv_lora_rank")) is not None and not is_latent:
        raise CheckpointError(
            f"{origin}: {name} has multi-head latent attention (kv_lora_rank {rank}), which is not supported yet"
        )


def _as_configured(config: Mapping[str, Any]) -> AttentionBias:
    asked = bool(config.get("attention_bias", False))
    return AttentionBias(asked, asked)


def _unless_refused(config: Mapping[str, Any]) -> AttentionBias:
    asked = bool(config.get("attention_bias", True))
    return AttentionBias(asked, asked)


def _on_inputs(config: Mapping[str, Any]) -> AttentionBias:
    return AttentionBias(qkv=True, output=False)


def _on_inputs_where_asked(config: Mapping[str, Any]) -> AttentionBias:
    return AttentionBias(qkv=bool(config.get("attention_bias", False)), output=False)


def _nowhere(config: Mapping[str, Any]) -> AttentionBias:
    return AttentionBias(qkv=False, output=False)


def _no_window(config: ConfigReader) -> Windows:
    """Llama has none; with one in the config it is another model."""
    window = config.values.get("sliding_window")
    if window is not None and config.values.get("use_sliding_window", True):
        raise CheckpointError(f"{config.origin}: sliding_window {window} is not supported for this architecture")
    return (None,) * config.size("num_hidden_layers")


def _window_everywhere(config: ConfigReader) -> Windows:
    """Mistral: a window in the config holds for every layer."""
    window = config.window()
    if window is not None and len(set(config.values.get("layer_types") or ())) > 1:
        raise CheckpointError(f"{config.origin}: layer_types that differ are not supported for this architecture")
    return (window,) * config.size("num_hidden_layers")


def _window_everywhere_where_asked(config: ConfigReader) -> Windows:
    """Qwen3-MoE: only with `use_sliding_window`, and then in every layer."""
    window = config.window() if config.values.get("use_sliding_window", False) else None
    return (window,) * config.size("num_hidden_layers")


def _window_where_asked(config: ConfigReader) -> Windows:
    """Qwen: only with `use_sliding_window`, and then in the layers that `layer_types` names, or in the upper ones."""
    num_layers = config.size("num_hidden_layers")
    window = config.window() if config.values.get("use_sliding_window", False) else None
    if window is None:
        return (None,) * num_layers
    if (kinds := config.layer_types()) is not None:
        return tuple(window if kind == SLIDING else None for kind in kinds)
    first = config.count("max_window_layers", _QWEN_FULL_LAYERS)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _window_in_turn(config: ConfigReader) -> Windows:
    """gpt-oss: in the layers that `layer_types` names, or in the first of every two."""
    num_layers, window = config.size("num_hidden_layers"), config.window(_GPT_OSS_WINDOW)
    kinds = config.layer_types() or tuple(FULL if index % 2 else SLIDING for index in range(num_layers))
    return tuple(window if kind == SLIDING else None for kind in kinds)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # what models call their number
_GPT_OSS_WINDOW = 128
_QWEN_FULL_LAYERS = 28  # below them no layer has a window, where the config does not say

FAMILIES = {
    "LlamaForCausalLM": Family(_as_configured, _no_window, mlp_bias=True),
    "MistralForCausalLM": Family(_nowhere, _window_everywhere),
    "Qwen2ForCausalLM": Family(_on_inputs, _window_where_asked),
    "MiMoForCausalLM": Family(_on_inputs, _window_where_asked),
    "Qwen3ForCausalLM": Family(_as_configured, _window_where_asked, head_norms=_always, head_dim=128),
    "Qwen3MoeForCausalLM": Family(_as_configured, _window_everywhere_where_asked, head_norms=_always),
    "MixtralForCausalLM": Family(_nowhere, _window_everywhere),
    "Glm4MoeForCausalLM": Family(_on_inputs_where_asked, _no_window, head_norms=_where_asked, rotated=0.5),
    "GptOssForCausalLM": Family(_unless_refused, _window_in_turn, head_dim=64, sinks=True),
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of one checkpoint. `origin` is the file that said so, for error messages."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: AttentionBias
    mlp_bias: bool
    head_norms: bool
    sinks: bool
    windows: Windows
    brings_draft: bool  # the checkpoint also holds a layer that drafts (`mtp_layouts.py`)
    rope: RopeConfig
    origin: str

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str) -> "LlamaConfig":
        """Read a target's or a head's config.json.

        Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported.
        """
        reader, family = ConfigReader(config, origin), family_of(config)
        reader.refuse_unless("hidden_act", "silu", "swish")
        heads, kv_heads, head_dim = reader.heads(family.head_dim)
        return cls(
            hidden_size=reader.size("hidden_size"),
            intermediate_size=reader.size("intermediate_size"),
            num_layers=reader.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=reader.size("vocab_size"),
            rms_norm_eps=reader.norm_eps(),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=family.attention_bias(config),
            mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
            head_norms=family.head_norms(config),
            sinks=family.sinks,
            windows=family.windows(reader),
            brings_draft=has_layer(config),
            rope=RopeConfig.from_hf(config, head_dim, origin, family.rotated),
            origin=origin,
        )

    def attention_shape(self, window: int | None) -> AttentionShape:
        """The heads of a layer with this window."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        return AttentionShape(*sizes, self.head_dim**-0.5, window, self.rope)


LoadMLP = Callable[[LlamaConfig, Weights, int], MLP]  # takes the MLP of a layer by its index


def load_dense_mlp(config: LlamaConfig, checkpoint: Weights, index: int) -> GatedMLP:
    """Take the MLP of a layer."""
    return take_mlp(checkpoint, f"layers.{index}.mlp", config.hidden_size, config.intermediate_size, config.mlp_bias)


def load_llama(config: LlamaConfig, checkpoint: Weights, load_mlp: LoadMLP = load_dense_mlp) -> DecoderWeights:
    """Take every weight of the target.

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    embedding = take_embedding(checkpoint, config.vocab_size, config.hidden_size)
    layers = tuple(
        load_layer(config, checkpoint, index, shape, config.hidden_size, "input_layernorm", load_mlp)
        for index, shape in enumerate(map(config.attention_shape, config.windows))
    )
    norm = load_norm(config, checkpoint, "norm")
    head = take_head(checkpoint, embedding, config.tie_word_embeddings)
    if config.brings_draft:
        checkpoint.skip(*(name for name in checkpoint.names() if is_draft_part(name, config.num_layers)))
    finish(checkpoint)
    return DecoderWeights(embedding, layers, norm, head)


def load_layer(
    config: LlamaConfig,
    checkpoint: Weights,
    index: int,
    shape: AttentionShape,
    input_size: int,
    input_norm: str | Norm,
    load_mlp: LoadMLP = load_dense_mlp,
) -> PreNormLayer:
    """Take one layer. `input_size` is the width that attention reads, `input_norm` the norm before it, or its name."""
    prefix = f"layers.{index}"
    hidden, attention = config.hidden_size, f"{prefix}.self_attn"
    shape = with_kv_scales(checkpoint, attention, shape)
    if config.sinks:
        shape = replace(shape, sinks=checkpoint.take(f"{attention}.sinks", (shape.num_heads,)))
    if isinstance(input_norm, str):
        input_norm = load_norm(config, checkpoint, f"{prefix}.{input_norm}")
    return PreNormLayer(
        input_norm=input_norm,
        attention=SelfAttention(
            _load_qkv(config, checkpoint, attention, shape, input_size),
            take_linear(
                checkpoint,
                {f"{attention}.o_proj": hidden},
                shape.num_heads * shape.head_dim,
                config.attention_bias.output,
            ),
            shape,
        ),
        mlp_norm=load_norm(config, checkpoint, f"{prefix}.post_attention_layernorm"),
        mlp=load_mlp(config, checkpoint, index),
    )


def _load_qkv(
    config: LlamaConfig, checkpoint: Weights, attention: str, shape: AttentionShape, input_size: int
) -> Projection:
    qkv, _ = take_qkv(checkpoint, attention, shape, input_size, config.attention_bias.qkv)
    if not config.head_norms:
        return qkv
    query, key = (checkpoint.take(f"{attention}.{name}.weight", (shape.head_dim,)) for name in ("q_norm", "k_norm"))
    if shape.rope.num_fixed:
        order = rotated_head(shape).to(query.device)
        query, key = query[order], key[order]
    return HeadNormLinear(qkv, query, key, shape.num_kv_heads, config.rms_norm_eps)


def layer_parts(layer: Any) -> dict[str, tuple[AnyLinear | Tensor, slice]]:
    """Where a loaded layer's weights are, by Llama's names: a linear or a norm's weight, and its rows.

    Those that have another form than Llama's are left out.
    """
    found, whole = dict[str, tuple[AnyLinear | Tensor, slice]](), slice(None)
    attention, mlp = layer.attention, getattr(layer, "mlp", None)
    if isinstance(attention, SelfAttention):
        qkv = attention.qkv.qkv if isinstance(attention.qkv, HeadNormLinear) else attention.qkv
        shape = attention.shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        if isinstance(qkv, AnyLinear) and qkv.out_features == queries + 2 * keys:
            rows = {"q": slice(0, queries), "k": slice(queries, queries + keys), "v": slice(queries + keys, None)}
            found |= {f"self_attn.{part}_proj.weight": (qkv, rows[part]) for part in "qkv"}
            found["self_attn.o_proj.weight"] = attention.output, whole
        if isinstance(attention.qkv, HeadNormLinear):
            found["self_attn.q_norm.weight"] = attention.qkv.query, whole
            found["self_attn.k_norm.weight"] = attention.qkv.key, whole
    if isinstance(mlp, GatedMLP):
        inner = mlp.down.in_features
        found["mlp.gate_proj.weight"] = mlp.gate_up, slice(0, inner)
        found["mlp.up_proj.weight"] = mlp.gate_up, slice(inner, None)
        found["mlp.down_proj.weight"] = mlp.down, whole
    norms = {"input_layernorm": layer.input_norm, "post_attention_layernorm": getattr(layer, "mlp_norm", None)}
    return found | {f"{name}.weight": (n.weight, whole) for name, n in norms.items() if isinstance(n, RMSNorm)}


class NormSizes(Protocol):
    """What a config tells of norms as wide as the residual."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...


def load_norm(config: NormSizes, checkpoint: Weights, name: str) -> RMSNorm:
    """Take a norm as wide as the residual."""
    return RMSNorm(checkpoint.take(f"{name}.weight", (config.hidden_size,)), config.rms_norm_eps)
