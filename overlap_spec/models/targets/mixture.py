"""What mixtures of experts share: sizes, and where a checkpoint has routers and experts.

As published, PREFIX.gate.weight [E, H] and PREFIX.experts.N.{gate, up, down}.weight; or as transformers 5 has them in
memory, mlp.gate.weight, mlp.experts.gate_up_proj [E, 2I, H], gate first, and mlp.experts.down_proj [E, H, I]. Some have
PREFIX.gate.e_score_correction_bias [E] too, and PREFIX.shared_experts.{gate, up, down}.weight, which is one MLP.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from overlap_spec_kernels import Grouping
from overlap_spec_kernels.experts.best_of_groups import sigmoid_scores, softmax_scores
from overlap_spec_kernels.experts.route import Common
from overlap_spec_kernels.launch import capability_of
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.mtp_layouts import is_draft_part
from overlap_spec.models.layers.decoder import DecoderLayer, PreNormLayer
from overlap_spec.models.layers.experts import (
    BestOfGroups,
    Choice,
    Experts,
    GatedExpert,
    MixtureMLP,
    MostProbable,
    Router,
    SeparateExperts,
    StackedExperts,
    separated,
)
from overlap_spec.models.layers.mlp import MLP, GatedMLP
from overlap_spec.models.layers.norm import Norm, wide_dtype
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.division import Part, both_halves, dividing, equal_part, sharing
from overlap_spec.models.loading.parts import finish, take_embedding, take_head, take_linear
from overlap_spec.models.loading.quantized import as_stack, is_quantized, take_matrix, take_stored
from overlap_spec.models.quantization.linear import StoredWeight, stacked
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.llama import LlamaConfig, load_dense_mlp, load_layer, load_llama
from overlap_spec.models.targets.reading import ConfigReader, DecoderConfig, OfDecoder

FUSED = "mlp"  # the prefix of fused experts
UNDIVIDED = "fewer than 16 bits are not divided among ranks; expected 16-bit weights"


@dataclass(frozen=True)
class ExpertNames:
    """What a published checkpoint calls a layer's mixture, and the linears of an expert."""

    prefix: str
    gate: str
    up: str
    down: str
    shared: str = "shared_experts"  # the expert that all rows have
    shared_gate: str | None = None  # a linear of one row, whose sigmoid weighs it; None: its weight is 1


NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
RATED_BY = 2  # experts of a group, of which the sum rates it, where a correction moves the choice
SCORES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": sigmoid_scores, "softmax": softmax_scores}


@dataclass(frozen=True)
class ExpertSizes:
    """Of every mixture of a model."""

    num_experts: int
    top_k: int
    inner_size: int  # of an expert
    normalised: bool  # a row's weights add up to 1
    shared_size: int = 0  # inner size of the expert that all rows have; 0: none
    grouping: Grouping | None = None  # how experts are chosen, if not by probability alone
    corrected: bool = False  # the choice is, by a bias of its own


@dataclass(frozen=True)
class MixtureConfig(OfDecoder):
    """A decoder of Llama's kind, some layers of which have experts."""

    decoder: LlamaConfig
    experts: ExpertSizes
    sparse: tuple[bool, ...]  # by layer

    @property
    def origin(self) -> str:
        """The file, for messages."""
        return self.decoder.origin


def read_sizes(
    reader: ConfigReader,
    num_experts: str,
    inner_size: str,
    normalised: bool,
    scores: Sequence[str] = ("softmax",),
    top_k: str = "num_experts_per_tok",
) -> ExpertSizes:
    """`num_experts`, `inner_size`, `top_k`: keys. `scores`: functions that the config may name, the first by default.

    Raises: CheckpointError naming file and key.
    """
    reader.refuse_unless("scoring_func", *scores)
    count, chosen = reader.size(num_experts), reader.size(top_k)
    if chosen > count:
        raise CheckpointError(f"{reader.origin}: {top_k}: found {chosen}, expected at most {num_experts} {count}")
    return ExpertSizes(count, chosen, reader.size(inner_size), normalised)


def read_grouped(
    reader: ConfigReader, scores: Sequence[str], rated_by: int, normalised: bool, grouped: bool = True
) -> ExpertSizes:
    """Experts that stand in groups. `scores`: functions of scores that the config may name, the first by default.

    `rated_by`: experts of a group, of which the sum rates it. `grouped`: rows keep to the best groups; false: they
    choose among all experts. Raises: CheckpointError naming file and key.
    """
    sizes = read_sizes(reader, "n_routed_experts", "moe_intermediate_size", normalised, scores)
    groups, kept = (reader.size("n_group", 1), reader.size("topk_group", 1)) if grouped else (1, 1)
    each, rest = divmod(sizes.num_experts, groups)
    if rest or (each < rated_by and kept < groups):
        raise CheckpointError(
            f"{reader.origin}: n_group: found {groups} groups of n_routed_experts {sizes.num_experts}, expected groups"
            f" of equal size, of {rated_by} or more"
        )
    if kept > groups or sizes.top_k > kept * each:
        raise CheckpointError(
            f"{reader.origin}: topk_group: found {kept} of {groups} groups of {each} experts, expected as many as a"
            f" row's {sizes.top_k} experts need, and no more than there are"
        )
    scale = float(reader.values.get("routed_scaling_factor") or 1.0)
    score = SCORES[reader.values.get("scoring_func") or scores[0]]
    shared = sizes.inner_size * reader.count("n_shared_experts", 0)
    return replace(sizes, shared_size=shared, grouping=Grouping(score, groups, kept, rated_by, scale))


def dense_first(reader: ConfigReader, default: int) -> tuple[bool, ...]:
    """By layer, whether it has experts: all but the first `first_k_dense_replace`."""
    reader.refuse_unless("moe_layer_freq", 1)
    dense = reader.count("first_k_dense_replace", default)
    return tuple(index >= dense for index in range(reader.size("num_hidden_layers")))


def load_mixture(config: MixtureConfig, checkpoint: Weights, names: ExpertNames = NAMES) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""

    def load_mlp(llama: LlamaConfig, weights: Weights, index: int) -> MLP:
        if not config.sparse[index]:
            return load_dense_mlp(llama, weights, index)
        return take_mixture(
            weights, f"layers.{index}", names, llama.hidden_size, config.experts, sharing(weights.division)
        )

    return load_llama(config.decoder, checkpoint, load_mlp)


def load_sparse_layer(config: MixtureConfig, checkpoint: Weights, index: int) -> PreNormLayer:
    """Take one layer, which has experts. Raises: CheckpointError naming file, tensor, found and expected."""

    def load_mlp(llama: LlamaConfig, weights: Weights, index: int) -> MLP:
        return take_mixture(
            weights, f"layers.{index}", NAMES, llama.hidden_size, config.experts, sharing(weights.division)
        )

    llama = config.decoder
    return load_layer(
        llama, checkpoint, index, llama.attention_shape(None), llama.hidden_size, "input_layernorm", load_mlp
    )


def take_mixture(
    checkpoint: Weights,
    layer: str,
    names: ExpertNames,
    hidden_size: int,
    sizes: ExpertSizes,
    rank: Rank = WHOLE,
) -> MixtureMLP:
    """Router and experts of a layer. Of several ranks each takes the whole router, and its columns of every expert."""
    fused = f"{layer}.{FUSED}"
    is_fused = any(f"{fused}.experts.{part}" in checkpoint for part in ("gate_up_proj", "down_proj"))
    prefix = fused if is_fused else f"{layer}.{names.prefix}"
    require_parts(checkpoint, f"{prefix}.experts", sizes, rank)
    gate = f"{prefix}.gate"
    router = take_router(checkpoint, gate, hidden_size, sizes, f"{gate}.e_score_correction_bias")
    own = replace(sizes, inner_size=sizes.inner_size // rank.ranks)
    parts = _fused_parts(rank, sizes.inner_size) if is_fused else _linear_parts(rank, names, sizes.inner_size)
    shared_name = f"{layer}.{names.prefix}.{names.shared}"
    common = None if is_fused else _joining(checkpoint, f"{prefix}.experts", shared_name, names, sizes, rank)
    experts: Experts
    with dividing(checkpoint, rank, parts, of_experts=True):
        if capability_of(checkpoint.forms.device) is None:
            take = _split if is_fused else _take_each
            experts = take(checkpoint, prefix, names, hidden_size, own)
        else:
            stack = _take_fused if is_fused else partial(_stack, common=common)
            experts = stack(checkpoint, prefix, names, hidden_size, own)
    shared, share, inner = None, None, sizes.shared_size
    if inner and names.shared_gate is not None:
        share = take_matrix(checkpoint, f"{layer}.{names.prefix}.{names.shared_gate}", (1, hidden_size))
    if common is not None:
        assert isinstance(experts, StackedExperts)
        experts = replace(experts, common=Common(experts.down.shape[0] - 1, share))
    elif inner:
        with dividing(checkpoint, rank, _linear_parts(rank, names, inner), of_experts=True):
            shared = _take_expert(checkpoint, shared_name, names, hidden_size, inner // rank.ranks)
        shared = shared if share is None else GatedExpert(shared.gate_up, shared.down, share)
    return MixtureMLP(router, experts, rank.communicator, shared)


def _joining(
    checkpoint: Weights, experts: str, shared: str, names: ExpertNames, sizes: ExpertSizes, rank: Rank
) -> str | None:
    """The shared expert's name, if it is one more in a GPU's stack: of the others' size, in few bits as they are."""
    if capability_of(checkpoint.forms.device) is None or rank.ranks > 1 or sizes.shared_size != sizes.inner_size:
        return None
    linears = (f"{name}.{part}" for name in (f"{experts}.0", shared) for part in (names.gate, names.up, names.down))
    return shared if checkpoint.scheme is not None and all(map(checkpoint.covers, linears)) else None


def _linear_parts(rank: Rank, names: ExpertNames, inner: int) -> dict[str, Part]:
    """Of an expert whose linears have names of their own."""
    rows = equal_part(rank, inner)
    return {names.gate: rows, names.up: rows, names.down: equal_part(rank, inner, dim=1)}


def _fused_parts(rank: Rank, inner: int) -> dict[str, Part]:
    """Of all experts in one tensor."""
    return {"gate_up_proj": both_halves(rank, inner, dim=1), "down_proj": equal_part(rank, inner, dim=2)}


def take_router(checkpoint: Weights, gate: str, hidden: int, sizes: ExpertSizes, correction: str) -> Router:
    """`correction`: its name. It is never rounded: what it tells apart may be closer than 16 bits."""
    weight = take_matrix(checkpoint, gate, (sizes.num_experts, hidden))
    choice: Choice = MostProbable(sizes.top_k, sizes.normalised)
    if sizes.grouping is not None:
        wide, shape = wide_dtype(checkpoint.forms.dtype), (sizes.num_experts,)
        added = checkpoint.take(correction, shape, wide) if sizes.corrected else None
        choice = BestOfGroups(sizes.top_k, sizes.normalised, sizes.grouping, added)
    return Router(weight, choice)


def _take_each(
    checkpoint: Weights, prefix: str, names: ExpertNames, hidden: int, sizes: ExpertSizes
) -> SeparateExperts:
    """Experts whose linears have names of their own, in any format of linears."""
    experts = (f"{prefix}.experts.{index}" for index in range(sizes.num_experts))
    return SeparateExperts(
        tuple(_take_expert(checkpoint, expert, names, hidden, sizes.inner_size) for expert in experts)
    )


def _take_expert(checkpoint: Weights, expert: str, names: ExpertNames, hidden: int, inner: int) -> GatedMLP:
    gate_up = {f"{expert}.{names.gate}": inner, f"{expert}.{names.up}": inner}
    down = {f"{expert}.{names.down}": hidden}
    return GatedMLP(take_linear(checkpoint, gate_up, hidden), take_linear(checkpoint, down, inner))


def _fused_matrices(checkpoint: Weights, prefix: str, hidden: int, sizes: ExpertSizes) -> tuple[Tensor, Tensor]:
    """Shapes: [E, 2I, H], gate first, [E, H, I].

    Raises: CheckpointError where a format of few bits is asked for: none is published in this layout.
    """
    refuse_format(
        checkpoint, f"{prefix}.experts", "experts in one tensor are not supported", "a tensor for each expert"
    )
    count, inner = sizes.num_experts, sizes.inner_size
    gate_up = checkpoint.take(f"{prefix}.experts.gate_up_proj", (count, 2 * inner, hidden))
    return gate_up, checkpoint.take(f"{prefix}.experts.down_proj", (count, hidden, inner))


def _take_fused(
    checkpoint: Weights, prefix: str, names: ExpertNames, hidden: int, sizes: ExpertSizes
) -> StackedExperts:
    return StackedExperts(*_fused_matrices(checkpoint, prefix, hidden, sizes))


def _split(checkpoint: Weights, prefix: str, names: ExpertNames, hidden: int, sizes: ExpertSizes) -> SeparateExperts:
    return separated(*_fused_matrices(checkpoint, prefix, hidden, sizes))


def _stack(
    checkpoint: Weights, prefix: str, names: ExpertNames, hidden: int, sizes: ExpertSizes, common: str | None = None
) -> StackedExperts:
    """Experts whose linears have names of their own, in any format of linears. `common`: one behind them.

    Raises: CheckpointError if some are in few bits and others are not.
    """
    count, inner, forms = sizes.num_experts, sizes.inner_size, checkpoint.forms
    experts = [f"{prefix}.experts.{index}" for index in range(count)] + ([] if common is None else [common])
    linears = names.gate, names.up, names.down
    if is_quantized(checkpoint, (f"{expert}.{linear}" for expert in experts for linear in linears)):
        return _stack_stored(checkpoint, experts, names, hidden, inner)
    gate_up = torch.empty((count, 2 * inner, hidden), dtype=forms.dtype, device=forms.device)
    down = torch.empty((count, hidden, inner), dtype=forms.dtype, device=forms.device)
    for index, expert in enumerate(experts):
        for target, linear in (
            (gate_up[index, :inner], names.gate),
            (gate_up[index, inner:], names.up),
            (down[index], names.down),
        ):
            weight = checkpoint.take(f"{expert}.{linear}.weight", tuple(target.shape))
            if not weight.is_meta:
                target.copy_(weight)
    return StackedExperts(gate_up, down)


def _stack_stored(
    checkpoint: Weights, experts: Sequence[str], names: ExpertNames, hidden: int, inner: int
) -> StackedExperts:
    """Of experts in few bits."""
    scheme = checkpoint.scheme
    assert scheme is not None
    gate_up: list[StoredWeight] = []
    down: list[StoredWeight] = []
    for expert in experts:
        halves = [
            take_stored(checkpoint, scheme, f"{expert}.{linear}", (inner, hidden)) for linear in (names.gate, names.up)
        ]
        is_outlined = bool(gate_up) and gate_up[0].values.is_meta
        gate_up.append(gate_up[0] if is_outlined else stacked(halves))
        down.append(take_stored(checkpoint, scheme, f"{expert}.{names.down}", (hidden, inner)))
    first = experts[0]
    return StackedExperts(
        as_stack(checkpoint, f"{first}.{names.gate}", gate_up, 2),
        as_stack(checkpoint, f"{first}.{names.down}", down, 1),
    )


def refuse_format(checkpoint: Weights, name: str, what: str, expected: str) -> None:
    """Raises: CheckpointError if these weights are stored in few bits."""
    if checkpoint.scheme is not None and checkpoint.covers(name):
        stored = checkpoint.scheme.stored.value
        raise CheckpointError(f"{checkpoint.origin}: {name}: {what} as {stored}; expected {expected}")


def require_parts(checkpoint: Weights, experts: str, sizes: ExpertSizes, rank: Rank) -> None:
    """Raises: CheckpointError naming these experts if there are several ranks that cannot share them."""
    if rank.ranks > 1 and checkpoint.covers(experts):
        raise CheckpointError(f"{checkpoint.origin}: {experts}: {UNDIVIDED}")
    if sizes.inner_size % rank.ranks:
        found = f"found {sizes.inner_size} inner columns, expected a multiple of {rank.ranks} ranks"
        raise CheckpointError(f"{checkpoint.origin}: {experts}: {found}")


@dataclass(frozen=True, kw_only=True)
class ByLayerConfig(OfDecoder):
    """A decoder, some layers of which have experts."""

    decoder: DecoderConfig
    experts: ExpertSizes
    sparse: tuple[bool, ...]  # by layer
    origin: str  # the file, for messages


def load_by_layer(
    config: ByLayerConfig, checkpoint: Weights, layers: Iterable[DecoderLayer], norm: Norm
) -> DecoderWeights:
    """Take the rest of the weights. `layers` are taken one after another, `norm` is the final one.

    Layers that draft are left to their own loader. Raises: CheckpointError naming file, tensor, found and expected.
    """
    embedding = take_embedding(checkpoint, config.vocab_size, config.hidden_size)
    loaded = tuple(layers)
    head = take_head(checkpoint, embedding, config.decoder.tie_word_embeddings)
    checkpoint.skip(*(name for name in checkpoint.names() if is_draft_part(name, config.num_layers)))
    finish(checkpoint)
    return DecoderWeights(embedding, loaded, norm, head)
