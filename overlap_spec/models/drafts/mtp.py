"""Multi-token-prediction layers that live in their target's checkpoint (DeepSeek-V3, arXiv:2412.19437; MiMo,
arXiv:2505.07608).

**One layer**, which runs once per guess:

    target's final hidden state --hidden norm--.
                embed(token) --token norm------+--> fc --> an ordinary layer --> norm --> output

The row at position p holds (features of p, token of p + 1). Features are the target's hidden state after its final
norm, or the layer's own output of the previous draft step. Embedding and head are the target's.

**Several layers**, one for each guess (DeepSeek-V3; MiMo-V2, Step-3.5). Layer i guesses the token at position p + 2 +
i: its row at position p holds (features of p, token of p + 1 + i). Each layer has a KV cache of its own. The features
of layer 0 are the target's hidden state before its final norm. In chained layers (Step-3.5), the features of layer i +
1 are the output of layer i at the same row, before its norm; otherwise (MiMo-V2) every layer reads the target's hidden
state.

**A checkpoint** has its target's own tensors too, which `load_mtp` skips:

    model.mtp_layers.0.input_proj.weight  ->  layers.0.input_proj.weight
    model.layers.0.mlp.up_proj.weight     ->  target.model.layers.0.mlp.up_proj.weight
"""

from dataclasses import dataclass, replace

import torch
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.drafts.mtp_layouts import OF_TARGET, MtpLayout
from overlap_spec.models.interfaces import DraftProfile, LazyLogits, LoadedTarget, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import PagedAttention, kv_shape_of
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.decoder import PreNormLayer, run_layers
from overlap_spec.models.layers.embedding import DraftInput, Embedding
from overlap_spec.models.layers.latent import paged_attention_of
from overlap_spec.models.layers.layer_run import KVRun
from overlap_spec.models.layers.linear import AnyLinear, HeadLogits, Linear, make_linear
from overlap_spec.models.layers.norm import Norm
from overlap_spec.models.loading import parts
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.targets import hybrid, latent, llama, mimo_v2_flash, mixture, step3p5
from overlap_spec.models.targets.hybrid import HybridConfig
from overlap_spec.models.targets.latent import LatentConfig
from overlap_spec.models.targets.llama import LlamaConfig
from overlap_spec.models.targets.mimo_v2_flash import MimoV2Config
from overlap_spec.models.targets.mixture import MixtureConfig
from overlap_spec.models.targets.reading import SLIDING
from overlap_spec.models.targets.step3p5 import Step35Config
from overlap_spec.models.work import count_bytes, total_work


@dataclass(frozen=True)
class MtpWeights:
    """A loaded layer (`LoadedDraft`). The embedding is the target's own, and so is the head without a token map."""

    embedding: Embedding  # [V, H]
    inputs: DraftInput
    fc: AnyLinear  # [H, 2 H]; the embedding's half comes first
    layer: PreNormLayer
    norm: Norm
    head: AnyLinear  # [Vd, H]: the target's, or some of its rows
    target_ids: Tensor  # [Vd] i64
    num_bytes: int  # memory of the layer's own weights
    embeds_first: bool  # false: the embedding at position 0 is replaced by zeros

    @property
    def profile(self) -> DraftProfile:
        """Absorbing committed tokens is a draft step; the embedding is only gathered from."""
        read = (self.inputs.token_norm, self.inputs.feature_norm, self.fc, self.layer, self.norm)
        work = total_work(part.work for part in read) + self.head.work.as_head()
        return DraftProfile(
            kv_shape=kv_shape_of([self.layer.attention.shape]),
            num_bytes=self.num_bytes,
            work=work,
            extend_work=work,
            draft_vocab_size=len(self.target_ids),
        )

    def attach(self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION) -> "MtpHead":
        """Join weights, cache and a rotary table of `num_positions` rows."""
        shapes = [self.layer.attention.shape]
        return MtpHead(self, paged_attention_of(shapes, self.embedding.dtype, cache, num_positions, attention))


class MtpHead:
    """`DraftHead` of one MTP layer, reused for every guess; or layer `index` of several, which share `attention`."""

    def __init__(self, weights: MtpWeights, attention: PagedAttention, index: int = 0) -> None:
        self.draft_vocab_size = len(weights.target_ids)
        self.target_ids = weights.target_ids
        self._weights = weights
        self._attention = attention
        self._index = index
        self._write_kv = KVRun((weights.layer,), attention, index)

    def fuse(self, output: TargetOutput) -> Tensor:
        """Shapes: -> [T, H]."""
        return output.hidden

    def forward(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Normed:
        """Shapes: tokens [T] i64, features [T, H] -> [T, H], before the final norm. Sync: never on CUDA."""
        layer, norm = self._weights.layer, self._weights.norm
        x = self._entered(tokens, features, rows)
        output, _ = run_layers(x, (layer,), norm, self._attention, rows, first=self._index)
        return output

    def absorb(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> None:
        """Shapes: tokens [T] i64, features [T, H]. Sync: never on CUDA."""
        self._write_kv(self._entered(tokens, features, rows), rows)

    def enter(self, output: Tensor) -> Normed:
        """Shapes: [R, H]."""
        return self._weights.norm.enter(output)

    def next_features(self, output: Normed) -> Tensor:
        """Shapes: [R, H] -> [R, H], after the final norm, as the target's are."""
        return output.normalised()

    def logits(self, output: Normed) -> LazyLogits:
        """Shapes: [R, H] -> logits [R, V]."""
        return HeadLogits(self._weights.head, output)

    def _entered(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Normed:
        """The layer's input. Shapes: -> [T, H]."""
        weights = self._weights
        return weights.layer.input_norm.enter(weights.fc(self._inputs(tokens, features, rows)))

    def _inputs(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Tensor:
        """Embedding and features, normalised, side by side.

        Only a prompt has a row at position 0, so decode windows, whose `row_starts` is None, skip that check.
        Shapes: -> [T, 2 H].
        """
        weights = self._weights
        x = weights.inputs(tokens, features)
        if not weights.embeds_first and rows.row_starts is not None:
            embedded = x[:, : features.shape[1]]
            embedded.masked_fill_((rows.positions == 0)[:, None], 0)
        return x


def swapped_halves(weight: Tensor) -> Tensor:
    """For a linear that reads features first. Shapes: [H, 2 H] -> the same."""
    features, embedded = weight.chunk(2, dim=1)
    return torch.cat((embedded, features), dim=1)


@dataclass(frozen=True)
class MtpLayersWeights:
    """Loaded layers, in the order of the guesses."""

    layers: tuple[MtpWeights, ...]
    chained: bool

    @property
    def profile(self) -> DraftProfile:
        """Caches are those of all layers. A draft step runs one layer."""
        profiles = [layer.profile for layer in self.layers]
        return replace(
            profiles[0],
            kv_shape=replace(profiles[0].kv_shape, num_layers=len(profiles)),
            num_bytes=sum(profile.num_bytes for profile in profiles),
        )

    def attach(
        self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION
    ) -> "MtpLayersHead":
        """Join weights, cache and a rotary table of `num_positions` rows."""
        shapes = [each.layer.attention.shape for each in self.layers]
        shared = paged_attention_of(shapes, self.layers[0].embedding.dtype, cache, num_positions, attention)
        return MtpLayersHead(tuple(MtpHead(layer, shared, i) for i, layer in enumerate(self.layers)), self.chained)


class MtpLayersHead:
    """The layers with their caches; each forward runs one of them."""

    def __init__(self, heads: tuple[MtpHead, ...], chained: bool) -> None:
        self.num_layers = len(heads)
        self.target_ids = heads[0].target_ids
        self._heads = heads
        self._chained = chained

    def features(self, output: TargetOutput) -> Tensor:
        """The target's hidden state before its final norm. Shapes: -> [T, H]."""
        assert isinstance(output.final, Normed), "a target hands on its residual with the norm"
        return output.final.values

    def forward(self, layer: int, tokens: Tensor, features: Tensor, rows: RowBatch) -> Tensor:
        """Shapes: tokens [T] i64, features [T, H] -> [T, H], before the layer's final norm. Sync: never on CUDA."""
        return self._heads[layer].forward(tokens, features, rows).values

    def next_features(self, features: Tensor, output: Tensor) -> Tensor:
        """The features of the next layer, from this layer's features and output. Shapes: [T, H] each -> [T, H]."""
        return output if self._chained else features

    def logits(self, layer: int, output: Tensor) -> LazyLogits:
        """Shapes: [R, H] -> logits [R, V]."""
        head = self._heads[layer]
        return head.logits(head.enter(output))


# Of checkpoints whose MTP layers are like their own layers.
LayerConfig = LlamaConfig | MixtureConfig | LatentConfig | MimoV2Config | Step35Config | HybridConfig


def load_mtp(
    config: LayerConfig,
    layout: MtpLayout,
    checkpoint: Weights,
    target: LoadedTarget,
    target_ids: Tensor | None = None,
) -> MtpWeights:
    """Take the one MTP layer. `config`: that of the whole checkpoint.

    With `target_ids` [N] i64 it guesses only these tokens (FR-Spec).

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint has instead.
    """
    _check_against_target(config, target)
    if any(name.startswith("layers.1.") for name in checkpoint.names()):
        raise CheckpointError(
            f"{checkpoint.origin}: it has several MTP layers, one for each guess: --enable-multi-layer-eagle runs them"
        )
    head, ids = parts.mapped_head(target, target_ids)
    weights = _load_layer(config, layout, checkpoint, 0, target, head, ids)
    _finish(checkpoint)
    return weights


def load_mtp_layers(
    config: LayerConfig, layout: MtpLayout, checkpoint: Weights, target: LoadedTarget, num_layers: int
) -> MtpLayersWeights:
    """Take the first `num_layers` MTP layers, one for each guess. `config` is that of the whole checkpoint.

    Raises: CheckpointError as `load_mtp` does; ConfigError if there are fewer than `num_layers`.
    """
    _check_against_target(config, target)
    found = {name.split(".")[1] for name in checkpoint.names() if name.startswith("layers.")}
    if found and len(found) < num_layers:  # random weights have as many as needed
        raise ConfigError(
            "speculative_num_steps",
            f"{checkpoint.origin} has {len(found)} MTP layers, one for each draft step of --enable-multi-layer-eagle:"
            f" give at most {len(found)}, not {num_layers}",
        )
    shared, ids = parts.mapped_head(target, None)
    layers = []
    for index in range(num_layers):
        name, shape = f"layers.{index}.{layout.head}.weight", (shared.out_features, shared.in_features)
        head = shared if layout.head is None else Linear(checkpoint.take(name, shape))
        layers.append(_load_layer(config, layout, checkpoint, index, target, head, ids))
    checkpoint.skip(*(name for name in checkpoint.names() if _is_layer_from(name, num_layers)))
    _finish(checkpoint)
    return MtpLayersWeights(tuple(layers), layout.chained)


def _load_layer(
    config: LayerConfig,
    layout: MtpLayout,
    checkpoint: Weights,
    index: int,
    target: LoadedTarget,
    head: AnyLinear,
    ids: Tensor,
) -> MtpWeights:
    """Take layer `index`, and skip its copies of the target's tensors."""
    prefix, hidden = f"layers.{index}", config.hidden_size
    names = (layout.token_norm, layout.hidden_norm, layout.norm)
    token_norm, hidden_norm, norm = (_load_norm(config, checkpoint, f"{prefix}.{name}") for name in names)
    weight = take_matrix(checkpoint, f"{prefix}.{layout.fc}", (hidden, 2 * hidden))
    fc = make_linear(swapped_halves(weight) if layout.hidden_first else weight)
    layer = _load_inner(config, layout, checkpoint, index)
    checkpoint.skip(*(f"{prefix}.{name}" for name in layout.copies))
    own = count_bytes((token_norm, hidden_norm, fc, layer, norm, ids))
    own += 0 if head is target.head else head.num_bytes
    inputs = DraftInput(target.embedding, token_norm, hidden_norm)
    return MtpWeights(target.embedding, inputs, fc, layer, norm, head, ids, own, layout.embeds_first)


def _load_norm(config: LayerConfig, checkpoint: Weights, name: str) -> Norm:
    if isinstance(config, Step35Config | HybridConfig):
        return parts.take_raised_norm(checkpoint, name, config.hidden_size, config.rms_norm_eps)
    return llama.load_norm(config, checkpoint, name)


def _load_inner(config: LayerConfig, layout: MtpLayout, checkpoint: Weights, index: int) -> PreNormLayer:
    """The layer like the target's own: of a mixture, one that has experts."""
    if isinstance(config, Step35Config):
        return step3p5.load_layer(config, checkpoint, index, config.num_layers + index)
    if isinstance(config, HybridConfig):
        return hybrid.load_layer(config, checkpoint, index, attends=True, sparse=config.experts.num_experts > 0)
    if isinstance(config, MimoV2Config):
        return mimo_v2_flash.load_layer(config, checkpoint, index, SLIDING, sparse=False)
    if isinstance(config, LatentConfig):
        return latent.load_layer(config, checkpoint, index, sparse=True)
    if isinstance(config, MixtureConfig):
        return mixture.load_sparse_layer(config, checkpoint, index)
    window = next((window for window in config.windows if window is not None), None) if layout.windowed else None
    shape = config.attention_shape(window)
    return llama.load_layer(config, checkpoint, index, shape, config.hidden_size, "input_layernorm")


def _finish(checkpoint: Weights) -> None:
    """Skip the target's tensors, which another loader takes, and check that no other tensor is left."""
    checkpoint.skip(*(name for name in checkpoint.names() if name.startswith(OF_TARGET)))
    parts.finish(checkpoint)


def _is_layer_from(name: str, first: int) -> bool:
    return name.startswith("layers.") and int(name.split(".")[1]) >= first


def _check_against_target(config: LayerConfig, target: LoadedTarget) -> None:
    sizes = {
        "hidden_size": (config.hidden_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
    }
    for key, (found, expected) in sizes.items():
        if found != expected:
            raise CheckpointError(
                f"{config.origin}: {key} is {found}, but the target's is {expected}: an MTP layer shares its target's"
                " embedding and head"
            )
