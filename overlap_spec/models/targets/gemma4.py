"""Gemma 4, text: E2B, E4B, 31B and 26B-A4B, as they are published with vision and audio or alone.

What it does differently from Gemma 3:

- norms multiply by their weight; values are normalised too; queries are not scaled; a layer's result is
- full layers have larger heads, of which the first pairs turn; their values may be their keys before norm and rotation
- the last layers (E2B, E4B) have queries alone, and attend to what the last layer of their kind before them has written
- each layer gets rows of a second embedding (E2B, E4B); or experts stand beside each dense MLP (26B-A4B)
- logits are bounded

Facts: transformers 5.17, models/gemma4/modeling_gemma4.py. Names there, which are the published ones:

    self_attn.{q, k, v, o}_proj, self_attn.{q, k}_norm, layer_scalar [1], the norms of Gemma 3
    embed_tokens_per_layer [V, L P], per_layer_model_projection [L P, H], per_layer_projection_norm [P]
    per_layer_input_gate [P, H], per_layer_projection [H, P], post_per_layer_input_norm [H]
    router.{proj [E, H], scale [H], per_expert_scale [E]}, experts.{gate_up_proj [E, 2I, H], down_proj [E, H, I]}
    post_feedforward_layernorm_{1, 2}, pre_feedforward_layernorm_2
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.embedding import Embedding
from overlap_spec.models.layers.gemma4 import CappedHead, ScaledLayer, TokenInputs, TokenMLP
from overlap_spec.models.layers.rope import PROPORTIONAL, RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import (
    finish,
    skip_but_text,
    take_embedding,
    take_head,
    take_linear,
    with_kv_scales,
)
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.gemma4_layers import take_dense, take_layer, take_mixture, take_norm
from overlap_spec.models.targets.mixture import ExpertSizes, read_sizes
from overlap_spec.models.targets.reading import FULL, SLIDING, ConfigReader, DecoderConfig, OfDecoder

# Where the config does not say.
HEAD_DIM, FULL_HEAD_DIM, WINDOW, EVERY, TOKEN_SIZE = 256, 512, 512, 6, 256
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
NOT_TEXT = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "multi_modal_projector.")
OF_KEYS = tuple(f"self_attn.{part}" for part in ("k_proj", "v_proj", "k_norm", "v_norm"))


@dataclass(frozen=True)
class Gemma4Config(OfDecoder):
    """A decoder whose layers are not alike."""

    decoder: DecoderConfig
    inner: tuple[int, ...]  # by layer: inner size of the dense MLP
    keys_are_values: bool  # of full layers
    token_size: int  # P, of the second embedding's rows for each layer; 0: there is none
    experts: ExpertSizes | None
    cap: float | None  # of logits


def read_config(config: Mapping[str, Any], origin: str) -> Gemma4Config:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    shapes = read_shapes(reader)
    num_layers, shared = len(shapes), reader.count("num_kv_shared_layers", 0)
    first = num_layers - shared
    for index in range(max(first, 0), num_layers):
        windows = [shape.window for shape in shapes[: max(first, 0)]]
        if shapes[index].window not in windows:
            raise CheckpointError(
                f"{origin}: num_kv_shared_layers: found {shared} of {num_layers} layers, expected that a layer before"
                f" them is of each kind, {SLIDING!r} or {FULL!r}, that they have"
            )
        source = len(windows) - 1 - windows[::-1].index(shapes[index].window)
        shapes[index] = replace(shapes[index], reads=source)
    wide = 2 if config.get("use_double_wide_mlp") else 1
    inner, cap = reader.size("intermediate_size"), config.get("final_logit_softcapping")
    token_size, experts = 0, None
    if config.get("hidden_size_per_layer_input", 1) is not None:
        token_size = reader.count("hidden_size_per_layer_input", TOKEN_SIZE)
    if token_size and reader.size("vocab_size_per_layer_input", reader.size("vocab_size")) != reader.size("vocab_size"):
        raise CheckpointError(
            f"{origin}: vocab_size_per_layer_input: found {config['vocab_size_per_layer_input']}, expected vocab_size"
            f" {config['vocab_size']}"
        )
    if config.get("enable_moe_block"):
        experts = read_sizes(reader, "num_experts", "moe_intermediate_size", normalised=True, top_k="top_k_experts")
    return Gemma4Config(
        decoder=reader.decoder(tuple(shapes), tied=True),
        inner=tuple(inner * (wide if shape.reads is not None else 1) for shape in shapes),
        keys_are_values=bool(config.get("attention_k_eq_v")),
        token_size=token_size,
        experts=experts,
        cap=None if cap is None else float(cap),
    )


def read_shapes(reader: ConfigReader) -> list[AttentionShape]:
    """The heads of each layer, as if it wrote its own keys and values. The last layer is a full one, always."""
    reader.refuse_unless("hidden_activation", "gelu_pytorch_tanh")
    reader.refuse_unless("attention_bias", False)
    reader.refuse_unless("use_bidirectional_attention", None, "vision")
    num_layers, heads = reader.size("num_hidden_layers"), reader.size("num_attention_heads")
    every = tuple(FULL if (index + 1) % EVERY == 0 else SLIDING for index in range(num_layers))
    kinds = (*(reader.layer_types() or every)[:-1], FULL)
    kv_heads, window = reader.size("num_key_value_heads", heads), reader.window(WINDOW)
    sizes = {kind: (kv_heads, reader.size("head_dim", HEAD_DIM)) for kind in ROPES}
    of_keys = reader.size("num_global_key_value_heads", kv_heads) if reader.values.get("attention_k_eq_v") else kv_heads
    sizes[FULL] = of_keys, reader.size("global_head_dim", FULL_HEAD_DIM)
    shapes = []
    for index, kind in enumerate(kinds):
        size = sizes[kind]
        own = (reader.values.get("per_layer_config") or {}).get(str(index)) or {}  # as transformers writes it
        of_layer = ConfigReader(own, f"{reader.origin}: per_layer_config.{index}")
        kv, dim = of_layer.size("num_key_value_heads", size[0]), of_layer.size("head_dim", size[1])
        if heads % kv or dim % 2:
            raise CheckpointError(
                f"{reader.origin}: layer {index}, {kind!r}: found {kv} heads of keys and {dim} columns, expected a"
                f" divisor of num_attention_heads {heads}, and an even number"
            )
        rope = _rope(reader, kind, dim)
        shapes.append(AttentionShape(heads, kv, dim, 1.0, window if kind == SLIDING else None, rope))
    return shapes


def _rope(reader: ConfigReader, kind: str, dim: int) -> RopeConfig:
    return reader.rope(reader.ropes_by_kind().get(kind) or ROPES[kind], dim)


def load(config: Gemma4Config, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = _scaled(take_embedding(checkpoint, vocab, hidden), hidden)
    by_layer = None
    if size := config.token_size:
        columns = config.num_layers * size
        rows = Embedding(checkpoint.take("embed_tokens_per_layer.weight", (vocab, columns)))
        by_layer = TokenInputs(
            _scaled(rows, size),
            take_linear(checkpoint, {"per_layer_model_projection": columns}, hidden),
            take_norm(config.decoder, checkpoint, "per_layer_projection_norm", size),
        )
    layers: list[ScaledLayer] = []
    for index in range(config.num_layers):
        source = config.decoder.shapes[index].reads
        layers.append(_load_layer(config, checkpoint, index, None if source is None else layers[source]))
    norm = take_norm(config.decoder, checkpoint, "norm", hidden)
    head = take_head(checkpoint, embedding, config.decoder.tie_word_embeddings)
    skip_but_text(checkpoint, NOT_TEXT)
    finish(checkpoint)
    return DecoderWeights(
        embedding, tuple(layers), norm, head if config.cap is None else CappedHead(head, config.cap), by_layer
    )


def _scaled(embedding: Embedding, size: int) -> Embedding:
    """By the root of a row's size, rounded to the model's type."""
    scale = torch.tensor(size**0.5, dtype=torch.float32)
    return embedding.scaled(float(scale.to(embedding.dtype)))


def _load_layer(config: Gemma4Config, checkpoint: Weights, index: int, source: ScaledLayer | None) -> ScaledLayer:
    """`source`: the layer whose keys and values this one attends to; None: it has its own."""
    name, hidden, decoder = f"layers.{index}", config.hidden_size, config.decoder
    shape = decoder.shapes[index]
    if source is None:
        shape = with_kv_scales(checkpoint, f"{name}.self_attn", shape)
    else:
        written = source.attention.shape
        assert isinstance(written, AttentionShape)
        shape = replace(shape, kv_scales=written.kv_scales)
        unused = tuple(f"{name}.{part}" for part in OF_KEYS)
        checkpoint.skip(*(each for each in checkpoint.names() if each.startswith(unused)))
    dense = take_dense(checkpoint, name, hidden, config.inner[index])
    experts = config.experts
    mlp = dense if experts is None else take_mixture(decoder, checkpoint, name, experts, dense)
    of_tokens = None
    if size := config.token_size:
        of_tokens = TokenMLP(
            take_linear(checkpoint, {f"{name}.per_layer_input_gate": size}, hidden),
            take_linear(checkpoint, {f"{name}.per_layer_projection": hidden}, size),
            take_norm(decoder, checkpoint, f"{name}.post_per_layer_input_norm", hidden),
        )
    return take_layer(
        decoder,
        checkpoint,
        name,
        shape,
        mlp,
        keys_are_values=config.keys_are_values,
        of_tokens=of_tokens,
    )
