"""What of each kind of target a rank has: its heads and inner columns, as a config of its own; or why it has none.

Heads are divided by groups that share keys and values. A head of keys and values that several ranks need is theirs all.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.config.quantization import Granularity, QuantizationScheme, Stored
from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.models.loading.checkpoint import EMBEDDING, HEAD
from overlap_spec.models.loading.division import (
    Division,
    Part,
    both_halves,
    equal_part,
    linear_of,
    moved,
    vocabulary_part,
)
from overlap_spec.models.registry import TargetConfig
from overlap_spec.models.targets.latent import LatentConfig
from overlap_spec.models.targets.llama import LlamaConfig
from overlap_spec.models.targets.mixture import MixtureConfig
from overlap_spec.models.targets.reading import DecoderConfig

RECURS = "layers with a recurrent state have no parts"
REFUSED = {
    **dict.fromkeys(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), "layers have heads of different sizes and numbers"
    ),
    "Olmo2ForCausalLM": "queries and keys are normalised over all heads at once",
    "MiMoV2FlashForCausalLM": "layers have different numbers of heads",
    "GraniteMoeHybridForCausalLM": RECURS,
    "Qwen3NextForCausalLM": RECURS,
    "Qwen3_5ForConditionalGeneration": RECURS,
    "Qwen3_5MoeForConditionalGeneration": RECURS,
    "Step3p5ForCausalLM": "layers have different numbers of heads, and each head a gate",
}
# Stored in 16 bits, or in few files: of a linear that is there, and has no part of its scales, the shape is refused.
UNSCALED = ("sinks", "qkv_proj", "gate_up_proj")


def refuse_undivided(
    config: Mapping[str, Any], origin: str, scheme: QuantizationScheme | None, is_gguf: bool, rank: Rank
) -> None:
    """Raises: CheckpointError naming tp_size and the family or format that is not divided yet."""
    for name in map(str, config.get("architectures") or ()):
        if name in REFUSED:
            raise _refused(origin, rank, f"{name} is not divided yet: {REFUSED[name]}")
    if scheme is not None and scheme.stored is not Stored.FLOAT8:
        raise _refused(origin, rank, f"{scheme.stored.value} are not divided yet")
    if is_gguf:
        raise _refused(origin, rank, "a GGUF file is not divided yet; give its safetensors")


def _refused(origin: str, rank: Rank, why: str) -> CheckpointError:
    return CheckpointError(f"{origin}: tp_size {rank.ranks}: {why}; use 1, or replicas")


def divided(
    config: TargetConfig, origin: str, rank: Rank, scheme: QuantizationScheme | None = None
) -> tuple[TargetConfig, Division]:
    """The config of a rank's layers, and its part of the tensors. Raises: CheckpointError naming tp_size and sizes.

    `scheme`: float8, whose scales are divided as their rows and blocks are.
    """
    own, parts = _own_config(config, origin, rank)
    if scheme is not None and isinstance(config, MixtureConfig | LatentConfig):
        raise _refused(origin, rank, f"{scheme.stored.value} of this family are not divided yet")
    scales = {} if scheme is None else _scale_parts(parts, scheme, origin, rank)
    vocabulary = vocabulary_part(rank, config.vocab_size)
    parts |= {linear_of(EMBEDDING): vocabulary, linear_of(HEAD): vocabulary}
    return own, Division(rank, parts, vocabulary, scales=scales, scale="" if scheme is None else f".{scheme.scale}")


def _own_config(config: TargetConfig, origin: str, rank: Rank) -> tuple[TargetConfig, dict[str, Part]]:
    """That of a rank's layers, and its part of each linear."""
    parts: dict[str, Part] = {}
    own: TargetConfig
    if isinstance(config, LlamaConfig):
        own, parts = divided_llama(config, origin, rank)
    elif isinstance(config, MixtureConfig):
        decoder, parts = divided_llama(config.decoder, origin, rank)
        own = replace(config, decoder=decoder)
    elif isinstance(config, LatentConfig):  # whose heads `take_attention` divides
        inner = config.decoder.intermediate_size
        if config.heads.num_heads % rank.ranks:
            raise _refused(origin, rank, f"num_attention_heads {config.heads.num_heads} is not a multiple of it")
        parts |= _inner_parts(inner, origin, rank)
        own = replace(config, decoder=replace(config.decoder, intermediate_size=inner // rank.ranks))
    elif isinstance(config, DecoderConfig):
        parts |= _inner_parts(config.intermediate_size, origin, rank)
        parts |= _head_parts(_only_heads(config, origin, rank), origin, rank)
        own = _own_decoder(config, rank)
    else:
        raise _refused(origin, rank, "layers of this family are not divided yet")
    return own, parts


def divided_llama(config: LlamaConfig, origin: str, rank: Rank) -> tuple[LlamaConfig, dict[str, Part]]:
    """The config of a rank's layers, and its part of each linear. Raises: CheckpointError naming tp_size and sizes."""
    heads = _head_parts((config.num_heads, config.num_kv_heads, config.head_dim), origin, rank)
    return _own_llama(config, rank), _inner_parts(config.intermediate_size, origin, rank) | heads


def _scale_parts(parts: Mapping[str, Part], scheme: QuantizationScheme, origin: str, rank: Rank) -> dict[str, Part]:
    """Of the scales of each linear; what is not named here, such as a tensor's one scale, is every rank's."""
    if scheme.granularity is Granularity.TENSOR:
        return {}
    if scheme.granularity is Granularity.CHANNEL:
        return {name: part for name, part in parts.items() if part.dim == 0}
    found = {}
    for name, part in parts.items():
        size = scheme.group_size or part.whole if part.dim else scheme.block_rows
        if all(edge % size == 0 or edge == part.whole for span in part.spans for edge in (span.start, span.stop)):
            found[name] = part.in_blocks(size)
        elif name not in UNSCALED:
            what = f"{name}: {part.whole} {'columns' if part.dim else 'rows'} do not divide at blocks of {size}"
            raise _refused(origin, rank, what)
    return found


def _own_llama(config: LlamaConfig, rank: Rank) -> LlamaConfig:
    return replace(
        config,
        num_heads=config.num_heads // rank.ranks,
        num_kv_heads=max(config.num_kv_heads // rank.ranks, 1),
        intermediate_size=config.intermediate_size // rank.ranks,
    )


def _own_decoder(config: DecoderConfig, rank: Rank) -> DecoderConfig:
    shapes = tuple(
        replace(
            shape,
            num_heads=shape.num_heads // rank.ranks,
            num_kv_heads=max(shape.num_kv_heads // rank.ranks, 1),
        )
        for shape in config.shapes
    )
    return replace(config, shapes=shapes, intermediate_size=config.intermediate_size // rank.ranks)


def _only_heads(config: DecoderConfig, origin: str, rank: Rank) -> tuple[int, int, int]:
    found = {(shape.num_heads, shape.num_kv_heads, shape.head_dim) for shape in config.shapes}
    if len(found) > 1:
        raise _refused(origin, rank, "layers have different numbers of heads, which are not divided yet")
    return found.pop()


def _head_parts(sizes: tuple[int, int, int], origin: str, rank: Rank) -> dict[str, Part]:
    """Of heads of queries, of keys and values, and their columns."""
    heads, kv_heads, dim = sizes
    if heads % rank.ranks:
        raise _refused(origin, rank, f"num_attention_heads {heads} is not a multiple of it")
    if max(kv_heads, rank.ranks) % min(kv_heads, rank.ranks):
        raise _refused(origin, rank, f"num_key_value_heads {kv_heads} neither divides by it nor divides it")
    each = max(kv_heads // rank.ranks, 1) * dim
    first = rank.rank * kv_heads // rank.ranks * dim
    query, key = equal_part(rank, heads * dim), Part(0, kv_heads * dim, (slice(first, first + each),))
    spans = (query.spans[0], *(moved(key.spans[0], query.whole + index * key.whole) for index in range(2)))
    return {
        "q_proj": query,
        "k_proj": key,
        "v_proj": key,
        "qkv_proj": Part(0, query.whole + 2 * key.whole, spans),
        "sinks": equal_part(rank, heads),
        "o_proj": equal_part(rank, heads * dim, dim=1),
    }


def _inner_parts(inner: int, origin: str, rank: Rank) -> dict[str, Part]:
    """Of a dense MLP."""
    if inner % rank.ranks:
        raise _refused(origin, rank, f"intermediate_size {inner} is not a multiple of it")
    gate = equal_part(rank, inner)
    return {
        "gate_proj": gate,
        "up_proj": gate,
        "gate_up_proj": both_halves(rank, inner),
        "down_proj": equal_part(rank, inner, dim=1),
    }
