"""Takes layers of Gemma 4 from a checkpoint: the target's (`gemma4.py`), and those of its assistant, which drafts."""

from overlap_spec_kernels import gelu_mul
from overlap_spec_kernels.launch import capability_of

from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import SelfAttention
from overlap_spec.models.layers.experts import Experts, MostProbable, Router, SeparateExperts, StackedExperts
from overlap_spec.models.layers.gemma4 import DenseAndRouted, HeadsLinear, ScaledLayer, TokenMLP
from overlap_spec.models.layers.linear import make_linear
from overlap_spec.models.layers.mlp import MLP, GeluMLP
from overlap_spec.models.layers.norm import WideRMSNorm, wide_dtype
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import take_gate_up, take_linear
from overlap_spec.models.targets.mixture import ExpertSizes, refuse_format
from overlap_spec.models.targets.reading import DecoderConfig


def take_layer(
    decoder: DecoderConfig,
    checkpoint: Weights,
    name: str,
    shape: AttentionShape,
    mlp: MLP,
    *,
    keys_are_values: bool = False,
    of_tokens: TokenMLP | None = None,
) -> ScaledLayer:
    """A layer around its MLP. `keys_are_values`: a full layer has no projection of values."""
    hidden = decoder.hidden_size

    def norm(part: str) -> WideRMSNorm:
        return take_norm(decoder, checkpoint, f"{name}.{part}", hidden)

    output = {f"{name}.self_attn.o_proj": hidden}
    return ScaledLayer(
        input_norm=norm("input_layernorm"),
        attention=SelfAttention(
            _take_heads(decoder, checkpoint, f"{name}.self_attn", shape, keys_are_values and shape.window is None),
            take_linear(checkpoint, output, shape.num_heads * shape.head_dim),
            shape,
        ),
        attention_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp=mlp,
        output_norm=norm("post_feedforward_layernorm"),
        scalar=checkpoint.take(f"{name}.layer_scalar", (1,)),
        of_tokens=of_tokens,
    )


def _take_heads(
    decoder: DecoderConfig, checkpoint: Weights, name: str, shape: AttentionShape, keys_are_values: bool
) -> HeadsLinear:
    keys, dim = shape.num_kv_heads * shape.head_dim, shape.head_dim
    sizes, key = {f"{name}.q_proj": shape.num_heads * dim}, None
    if shape.reads is None:
        sizes |= {f"{name}.{part}_proj": keys for part in ("k" if keys_are_values else "kv")}
        key = take_norm(decoder, checkpoint, f"{name}.k_norm", dim)
    linear = take_linear(checkpoint, sizes, decoder.hidden_size)
    return HeadsLinear(linear, take_norm(decoder, checkpoint, f"{name}.q_norm", dim), key, shape)


def take_dense(checkpoint: Weights, name: str, hidden: int, inner: int) -> GeluMLP:
    """A layer's dense MLP."""
    down = {f"{name}.mlp.down_proj": hidden}
    return GeluMLP(take_gate_up(checkpoint, f"{name}.mlp", hidden, inner), take_linear(checkpoint, down, inner))


def take_mixture(
    decoder: DecoderConfig, checkpoint: Weights, name: str, sizes: ExpertSizes, dense: GeluMLP
) -> DenseAndRouted:
    """A layer's experts, which stand beside its dense MLP."""
    hidden = decoder.hidden_size
    count, inner, experts = sizes.num_experts, sizes.inner_size, f"{name}.experts"
    refuse_format(checkpoint, experts, "experts in one tensor are not supported", "a tensor for each expert")
    stacks = (
        checkpoint.take(f"{experts}.gate_up_proj", (count, 2 * inner, hidden)),
        checkpoint.take(f"{experts}.down_proj", (count, hidden, inner)),
    )
    routed: Experts
    if capability_of(checkpoint.forms.device) is None:
        pairs = zip(*stacks, strict=True)
        routed = SeparateExperts(tuple(GeluMLP(make_linear(gate_up), make_linear(down)) for gate_up, down in pairs))
    else:
        routed = StackedExperts(*stacks, clamp=gelu_mul)
    wide = wide_dtype(checkpoint.forms.dtype)
    scale = checkpoint.take(f"{name}.router.scale", (hidden,)).to(wide) * hidden**-0.5
    return DenseAndRouted(
        router=Router(
            checkpoint.take(f"{name}.router.proj.weight", (count, hidden)), MostProbable(sizes.top_k, normalised=True)
        ),
        experts=routed,
        shared=dense,
        factors=checkpoint.take(f"{name}.router.per_expert_scale", (count,), wide),
        router_norm=WideRMSNorm(scale, decoder.rms_norm_eps),
        routed_norm=take_norm(decoder, checkpoint, f"{name}.pre_feedforward_layernorm_2", hidden),
        dense_output_norm=take_norm(decoder, checkpoint, f"{name}.post_feedforward_layernorm_1", hidden),
        routed_output_norm=take_norm(decoder, checkpoint, f"{name}.post_feedforward_layernorm_2", hidden),
    )


def take_norm(decoder: DecoderConfig, checkpoint: Weights, name: str, size: int) -> WideRMSNorm:
    """A norm that multiplies by its weight, in float32 or wider."""
    weight = checkpoint.take(f"{name}.weight", (size,))
    return WideRMSNorm(weight.to(wide_dtype(weight.dtype)), decoder.rms_norm_eps)
