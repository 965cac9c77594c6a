"""What models with multi-head latent attention share: sizes, and where a checkpoint has it all.

self_attn.q_proj, or self_attn.{q_a_proj, q_a_layernorm, q_b_proj}     queries, n (dn + dr) rows
self_attn.{kv_a_proj_with_mqa, kv_a_layernorm}                          the token's row: r + dr rows
self_attn.kv_b_proj [n (dn + dv), r]                                    of each head W_key, then W_value
self_attn.o_proj [H, n dv]
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from overlap_spec_kernels.attention.latent_attention import MAX_RANK, MAX_ROPE, STEP

from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.mtp_layouts import has_layer, is_draft_part
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import PreNormLayer
from overlap_spec.models.layers.latent import LatentAttention, LatentProjection, LatentRows, LowRankQueries
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.mlp import MLP
from overlap_spec.models.layers.norm import RMSNorm
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.models.layers.rope import RopeConfig, yarn_mscale
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.division import Part, dividing, equal_part, sharing
from overlap_spec.models.loading.parts import finish, take_embedding, take_head, take_linear, take_mlp, with_kv_scales
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.mixture import NAMES, ExpertSizes, take_mixture
from overlap_spec.models.targets.reading import ConfigReader, DecoderConfig, OfDecoder

LATENT_EPS = 1e-6  # of the norms of latents, whatever `rms_norm_eps` is


@dataclass(frozen=True)
class LatentSizes:
    """The heads of every layer."""

    num_heads: int
    query_rank: int | None  # of the queries' own latent; None: they have none
    rank: int  # of the latent of keys and values
    whole_dim: int  # columns of a query that are not rotated
    rope_dim: int  # columns that are
    value_dim: int
    interleaved: bool  # see `LatentRows`

    @property
    def query_dim(self) -> int:
        """Columns of a query."""
        return self.whole_dim + self.rope_dim

    @property
    def row(self) -> int:
        """Columns of a token's row."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class LatentConfig(OfDecoder):
    """A decoder with latent attention, some layers of which have experts."""

    decoder: DecoderConfig
    heads: LatentSizes
    experts: ExpertSizes
    sparse: tuple[bool, ...]  # by layer
    brings_draft: bool  # the checkpoint also holds a layer that drafts
    origin: str  # the file, for messages

    def refuse_on_gpu(self) -> None:
        """Raises: CheckpointError naming the key, where a token's row is not as a GPU's kernel takes it."""
        sizes = {"kv_lora_rank": (self.heads.rank, MAX_RANK), "qk_rope_head_dim": (self.heads.rope_dim, MAX_ROPE)}
        for key, (found, most) in sizes.items():
            if found > most or found % STEP:
                wanted = f"at most {most}, and a multiple of {STEP}, on a GPU"
                raise CheckpointError(f"{self.origin}: {key}: found {found}, expected {wanted}; use --device cpu")


def read_latent(
    config: Mapping[str, Any], origin: str, experts: ExpertSizes, sparse: tuple[bool, ...], interleaved: bool = True
) -> LatentConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    reader.refuse_unless("hidden_act", "silu", "swish")
    reader.refuse_unless("attention_bias", False)
    num_heads = reader.size("num_attention_heads")
    reader.refuse_unless("num_key_value_heads", num_heads)
    query_rank = None if config.get("q_lora_rank") is None else reader.size("q_lora_rank")
    whole, turned, value = (reader.size(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
    heads = LatentSizes(num_heads, query_rank, reader.size("kv_lora_rank"), whole, turned, value, interleaved)
    if heads.rope_dim % 2:
        raise CheckpointError(f"{origin}: qk_rope_head_dim: found {heads.rope_dim}, expected an even number")
    rope = RopeConfig.from_hf(config, heads.rope_dim, origin)
    scale = heads.query_dim**-0.5 * _sharpened(rope) ** 2
    shape = AttentionShape(num_heads, 1, heads.row, scale, None, rope, latent_rank=heads.rank)
    decoder = reader.decoder((shape,) * reader.size("num_hidden_layers"))
    return LatentConfig(decoder, heads, experts, sparse, has_layer(config), origin)


def _sharpened(rope: RopeConfig) -> float:
    """The factor of queries and of keys, in all their columns, where positions are stretched."""
    weight = rope.scaling.get("mscale_all_dim")
    return yarn_mscale(float(rope.scaling["factor"]), float(weight)) if weight and rope.kind != "default" else 1.0


def load_latent(config: LatentConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    decoder = config.decoder
    embedding = take_embedding(checkpoint, decoder.vocab_size, decoder.hidden_size)
    layers = tuple(load_layer(config, checkpoint, index, sparse) for index, sparse in enumerate(config.sparse))
    norm = _take_norm(config, checkpoint, "norm")
    head = take_head(checkpoint, embedding, decoder.tie_word_embeddings)
    if config.brings_draft:
        checkpoint.skip(*(name for name in checkpoint.names() if is_draft_part(name, config.num_layers)))
    finish(checkpoint)
    return DecoderWeights(embedding, layers, norm, head)


def load_layer(config: LatentConfig, checkpoint: Weights, index: int, sparse: bool) -> PreNormLayer:
    """Take one layer. `sparse`: it has experts."""
    name, hidden, inner = f"layers.{index}", config.hidden_size, config.decoder.intermediate_size
    mlp: MLP
    if sparse:
        mlp = take_mixture(checkpoint, name, NAMES, hidden, config.experts, sharing(checkpoint.division))
    else:
        mlp = take_mlp(checkpoint, f"{name}.mlp", hidden, inner)
    return PreNormLayer(
        input_norm=_take_norm(config, checkpoint, f"{name}.input_layernorm"),
        attention=take_attention(config, checkpoint, f"{name}.self_attn", sharing(checkpoint.division)),
        mlp_norm=_take_norm(config, checkpoint, f"{name}.post_attention_layernorm"),
        mlp=mlp,
    )


def take_attention(config: LatentConfig, checkpoint: Weights, name: str, rank: Rank = WHOLE) -> LatentAttention:
    """Take the attention of a layer. Of several ranks each takes its part of the heads, and the whole row."""
    heads = config.heads
    if heads.num_heads % rank.ranks:
        raise CheckpointError(
            f"{checkpoint.origin}: {name}: found {heads.num_heads} heads, expected a multiple of {rank.ranks} ranks"
        )
    num_heads, size = heads.num_heads // rank.ranks, heads.whole_dim + heads.value_dim
    with dividing(checkpoint, rank, _parts_of(heads, rank)):
        down, low_rank = _take_queries(config, checkpoint, name, num_heads)
        row_norm = _take_latent_norm(checkpoint, f"{name}.kv_a_layernorm", heads.rank)
        both = take_matrix(checkpoint, f"{name}.kv_b_proj", (num_heads * size, heads.rank))
        output = take_linear(checkpoint, {f"{name}.o_proj": config.hidden_size}, num_heads * heads.value_dim)
    key, value = both.view(num_heads, size, heads.rank).split((heads.whole_dim, heads.value_dim), dim=1)
    shape = with_kv_scales(checkpoint, name, config.decoder.shapes[0])
    scales = shape.kv_scales._replace(v=shape.kv_scales.k)  # a value is a part of its key
    rows = LatentRows(down, row_norm, heads.rope_dim, heads.interleaved)
    return LatentAttention(
        LatentProjection(rows, low_rank, key.contiguous()),
        value.transpose(1, 2).contiguous(),
        output,
        replace(shape, num_heads=num_heads, kv_scales=scales),
    )


def _parts_of(heads: LatentSizes, rank: Rank) -> dict[str, Part]:
    """Of what is by heads."""
    queries = equal_part(rank, heads.num_heads * heads.query_dim)
    return {
        "q_proj": queries,
        "q_b_proj": queries,
        "kv_b_proj": equal_part(rank, heads.num_heads * (heads.whole_dim + heads.value_dim)),
        "o_proj": equal_part(rank, heads.num_heads * heads.value_dim, dim=1),
    }


def _take_queries(
    config: LatentConfig, checkpoint: Weights, name: str, num_heads: int
) -> tuple[AnyLinear, LowRankQueries | None]:
    """The linear of a rank's queries, or of their latent, and of the token's row; and what is done to that latent."""
    heads, row = config.heads, f"{name}.kv_a_proj_with_mqa"
    num_queries = num_heads * heads.query_dim
    if heads.query_rank is None:
        return take_linear(checkpoint, {f"{name}.q_proj": num_queries, row: heads.row}, config.hidden_size), None
    down = take_linear(checkpoint, {f"{name}.q_a_proj": heads.query_rank, row: heads.row}, config.hidden_size)
    norm = _take_latent_norm(checkpoint, f"{name}.q_a_layernorm", heads.query_rank)
    up = take_linear(checkpoint, {f"{name}.q_b_proj": num_queries}, heads.query_rank)
    return down, LowRankQueries(norm, up)


def _take_norm(config: LatentConfig, checkpoint: Weights, name: str) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", (config.hidden_size,)), config.decoder.rms_norm_eps)


def _take_latent_norm(checkpoint: Weights, name: str, size: int) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", (size,)), LATENT_EPS)
