"""The EAGLE-3 draft head (Li et al. 2025, arXiv:2503.01840).

    the target's aux hidden states --fc--> h --hidden_norm--.
                 embed(token) --input_layernorm--+--> 2H-wide attention --> + --> mlp --> + --> output
                                             h ------------------------------'

The row at position p holds (features of p, token of p + 1). Features are the target's aux hidden states after `fc`, or
the head's own output of the previous draft step, which has the same width and skips `fc`.

P-EAGLE (Hui et al. 2026, arXiv:2602.01469): a head with a tensor `mask_hidden` has learnt to guess several tokens in
one forward, from rows of a mask token whose features are those of `mask_hidden`. Its embedding is its own.

A checkpoint's config is checked against its target. Layer ids in it name layer outputs: 1 is the residual after the
second layer. Published layouts differ in the prefix `model.`, in `midlayer` for `layers.0`, and in the tensors that
they leave out because the target has them.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import DraftProfile, LazyLogits, LoadedTarget, MaskRow, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import PagedAttention, kv_shape_of
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.decoder import PreNormLayer
from overlap_spec.models.layers.embedding import DraftInput, Embedding
from overlap_spec.models.layers.layer_run import KVRun, LayerRun
from overlap_spec.models.layers.linear import AnyLinear, HeadLogits, Linear, make_linear
from overlap_spec.models.layers.norm import RMSNorm
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.models.loading.checkpoint import Weights, type_name
from overlap_spec.models.loading.division import Part, dividing
from overlap_spec.models.loading.parts import finish, take_embedding
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.targets.divided import divided_llama
from overlap_spec.models.targets.llama import LlamaConfig, layer_parts, load_layer, load_norm
from overlap_spec.models.work import ForwardWork, count_bytes, total_work

MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")  # of config.json, for the token of mask rows
MASK = "mask_hidden"  # a tensor, and architectures that have it
PARALLEL = ("PEagleDraftModel", "PeagleLlamaForCausalLM")
LAYER = "midlayer"  # what SpecForge calls `layers.0`


@dataclass(frozen=True)
class Eagle3Config:
    """The head's own Llama-style numbers, and the parts that it takes from the target."""

    llama: LlamaConfig
    aux_layers: tuple[int, ...]  # ascending; empty: the target's final hidden state instead
    target_hidden_size: int
    draft_vocab_size: int | None  # None: the target's head is used
    norm_output: bool  # feed the normed output back instead of the residual sum
    fc_bias: bool
    norm_residual: bool  # the first layer adds to the normed features
    is_parallel: bool  # config.json names a P-EAGLE head
    mask_token: int | None  # of a P-EAGLE head
    norms_all: bool = False  # the aux hidden states are normalised together, before `fc`
    own_embedding: bool = False  # it was trained too

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], num_target_layers: int, origin: str) -> "Eagle3Config":
        """Read a head's config.json.

        Raises: CheckpointError naming `origin` and the key.
        """
        if "transformer_layer_config" in config:
            raise CheckpointError(
                f"{origin}: speculators_model_type: found {config.get('speculators_model_type')!r},"
                " expected 'eagle3' or 'peagle': no other head in the layout of speculators is read"
            )
        llama = LlamaConfig.from_hf(config, origin)
        return cls(
            llama=llama,
            aux_layers=_aux_layers(config, num_target_layers, origin),
            target_hidden_size=int(config.get("target_hidden_size") or llama.hidden_size),
            draft_vocab_size=config.get("draft_vocab_size"),
            norm_output=bool(config.get("norm_output", False)),
            fc_bias=bool(config.get("bias", False)),
            norm_residual=bool(config.get("norm_before_residual", False)),
            is_parallel=(config.get("architectures") or ("",))[0] in PARALLEL,
            mask_token=next((config[key] for key in MASK_KEYS if config.get(key) is not None), None),
            norms_all=bool(config.get("norm_before_fc", False)),
            own_embedding=bool(config.get("embed_requires_grad", False)),
        )

    @property
    def fused_size(self) -> int:
        """Columns of fc: the concatenated aux hidden states."""
        return max(len(self.aux_layers), 1) * self.target_hidden_size


def _aux_layers(config: Mapping[str, Any], num_layers: int, origin: str) -> tuple[int, ...]:
    eagle = config.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        return ()
    given = eagle.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(sorted(given)) if given else default_aux_layers(num_layers)
    if not layers:
        raise CheckpointError(
            f"{origin}: a target of {num_layers} layers has no default aux layers;"
            " give eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    if len(set(layers)) != len(layers) or not all(
        isinstance(layer, int) and 0 <= layer < num_layers for layer in layers
    ):
        raise CheckpointError(
            f"{origin}: eagle_aux_hidden_state_layer_ids must be distinct layers of the target, 0 to {num_layers - 1},"
            f" found {list(layers)}"
        )
    expected = config.get("num_aux_hidden_states")
    if expected is not None and expected != len(layers):
        raise CheckpointError(
            f"{origin}: num_aux_hidden_states is {expected}, but {len(layers)} aux layers are named: {list(layers)}"
        )
    return layers


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as SGLang reads them; none where the target has too few."""
    low, middle, high = 1, num_layers // 2 - 1, num_layers - 4
    return (low, middle, high) if low < middle < high else ()


@dataclass(frozen=True)
class Eagle3Fusion:
    """Turns the target's aux hidden states into features: an optional norm each, then a linear if widths differ."""

    norms: tuple[RMSNorm, ...]
    fc: AnyLinear | None  # [Hd, n * H]

    @property
    def work(self) -> ForwardWork:
        """The work of norms and linear."""
        return total_work(part.work for part in (*self.norms, self.fc) if part is not None)

    def __call__(self, output: TargetOutput) -> Tensor:
        """Shapes: -> [T, Hd]."""
        aux_hidden = output.aux if output.aux.shape[1] else output.hidden
        if self.norms:
            parts = aux_hidden.chunk(len(self.norms), dim=1)
            aux_hidden = torch.cat(
                [norm(part.contiguous()) for norm, part in zip(self.norms, parts, strict=True)], dim=1
            )
        return aux_hidden if self.fc is None else self.fc(aux_hidden)


@dataclass(frozen=True)
class Eagle3Weights:
    """A loaded head (`LoadedDraft`). Embedding and head may be the target's own tensors."""

    config: Eagle3Config
    embedding: Embedding  # [V, Hd]
    fusion: Eagle3Fusion
    inputs: DraftInput  # its norm of the embedding is the first layer's `input_norm`
    layers: tuple[PreNormLayer, ...]  # the first one's qkv is [(n + 2 nkv) d, 2 Hd]
    norm: RMSNorm
    head: AnyLinear  # [Vd, Hd]
    target_ids: Tensor  # [Vd] i64
    num_bytes: int  # memory of the head's own weights
    mask: MaskRow | None = None  # of a P-EAGLE head

    @property
    def profile(self) -> DraftProfile:
        """Absorbing committed tokens is a draft step, and the fusion; the embedding is only gathered from."""
        norms = self.inputs.feature_norm.work + self.norm.work  # the first layer counts the embedding's norm
        work = norms + total_work(layer.work for layer in self.layers) + self.head.work.as_head()
        return DraftProfile(
            kv_shape=kv_shape_of([layer.attention.shape for layer in self.layers]),
            num_bytes=self.num_bytes,
            work=work,
            extend_work=self.fusion.work + work,
            aux_layers=self.config.aux_layers,
            draft_vocab_size=len(self.target_ids),
            reads_hidden=not self.config.aux_layers,
        )

    def attach(
        self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION
    ) -> "Eagle3Head":
        """Join weights, cache and the head's own rotary table of `num_positions` rows."""
        shapes = [layer.attention.shape for layer in self.layers]
        return Eagle3Head(self, PagedAttention(shapes, self.embedding.dtype, cache, num_positions, attention))


class Eagle3Head:
    """`DraftHead` of EAGLE-3."""

    def __init__(self, weights: Eagle3Weights, attention: PagedAttention) -> None:
        self.draft_vocab_size = len(weights.target_ids)
        self.target_ids = weights.target_ids
        self._weights = weights
        self._run_layers = LayerRun(weights.layers, weights.norm, attention)
        self._write_kv = KVRun(weights.layers, attention)

    def fuse(self, output: TargetOutput) -> Tensor:
        """Shapes: -> [T, Hd]."""
        return self._weights.fusion(output)

    def forward(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Normed:
        """Shapes: tokens [T] i64, features [T, Hd] -> [T, Hd], before the final norm. Sync: never on CUDA."""
        output, _ = self._run_layers(self._entering(tokens, features), rows)
        return output

    def absorb(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> None:
        """Shapes: tokens [T] i64, features [T, Hd]. Sync: never on CUDA."""
        self._write_kv(self._entering(tokens, features), rows)

    def _entering(self, tokens: Tensor, features: Tensor) -> Normed:
        """The residual, and what the first layer reads. Shapes: tokens [T] i64, features [T, Hd]."""
        inputs = self._weights.inputs
        residual = inputs.feature_norm(features) if self._weights.config.norm_residual else features
        return Normed(residual, inputs(tokens, features))

    def enter(self, output: Tensor) -> Normed:
        """Shapes: [R, Hd]."""
        return self._weights.norm.enter(output)

    def next_features(self, output: Normed) -> Tensor:
        """Shapes: [R, Hd] -> [R, Hd]."""
        return output.normalised() if self._weights.config.norm_output else output.values

    def logits(self, output: Normed) -> LazyLogits:
        """Shapes: [R, Hd] -> logits [R, Vd]."""
        return HeadLogits(self._weights.head, output)


def load_eagle3(config: Eagle3Config, checkpoint: Weights, target: LoadedTarget, rank: Rank = WHOLE) -> Eagle3Weights:
    """Take every weight of the head; use the target's embedding and head where the checkpoint has none.

    `rank`: whose part of the layers is taken. Raises: CheckpointError naming file, tensor, found and expected.
    """
    _check_against_target(config, checkpoint, target)
    fusion = _load_fusion(config, checkpoint)
    mask = _load_mask(config, checkpoint, fusion, target)
    hidden_norm = load_norm(config.llama, checkpoint, "layers.0.hidden_norm")
    token_norm = load_norm(config.llama, checkpoint, "layers.0.input_layernorm")
    layers = _load_layers(config, checkpoint, token_norm, rank)
    norm = load_norm(config.llama, checkpoint, "norm")
    embedding = _load_embedding(config, checkpoint, target)
    head = _load_head(config, checkpoint, target, embedding)
    target_ids = _load_target_ids(checkpoint, head, target)
    checkpoint.skip("t2d")
    finish(checkpoint)
    inputs = DraftInput(embedding, token_norm, hidden_norm)
    own = count_bytes((fusion, inputs, layers, norm, head, target_ids, mask))
    shared = tuple(part for part, whole in ((embedding, target.embedding), (head, target.head)) if part is whole)
    own -= count_bytes(shared)
    return Eagle3Weights(config, embedding, fusion, inputs, layers, norm, head, target_ids, own, mask)


def tensor_places(weights: Eagle3Weights) -> dict[str, tuple[Any, slice]]:
    """Where each tensor of a head of one layer is, by SpecForge's names: a linear or a norm's weight, and its rows."""
    norm, whole = weights.inputs.feature_norm, slice(None)
    assert isinstance(norm, RMSNorm), "as it is loaded"
    return {
        "fc.weight": (weights.fusion.fc, whole),
        **{f"{LAYER}.{name}": place for name, place in layer_parts(weights.layers[0]).items()},
        f"{LAYER}.hidden_norm.weight": (norm.weight, whole),
        "norm.weight": (weights.norm.weight, whole),
        "lm_head.weight": (weights.head, whole),
    }


def _check_against_target(config: Eagle3Config, checkpoint: Weights, target: LoadedTarget) -> None:
    origin = config.llama.origin
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{origin}: the head expects a target of hidden size {config.target_hidden_size}"
            f" (target_hidden_size, else hidden_size), but the target's is {target.hidden_size}"
        )
    if config.aux_layers and "fc.weight" in checkpoint:
        found = checkpoint.shape("fc.weight")
        if found != (config.llama.hidden_size, config.fused_size):
            raise CheckpointError(
                f"{checkpoint.file_of('fc.weight')}: tensor fc.weight: found shape {list(found)}, expected"
                f" {[config.llama.hidden_size, config.fused_size]}: {len(config.aux_layers)} aux layers x"
                f" the target's hidden size {target.hidden_size}"
            )


def _load_fusion(config: Eagle3Config, checkpoint: Weights) -> Eagle3Fusion:
    width, hidden = config.target_hidden_size, config.llama.hidden_size
    norms: tuple[RMSNorm, ...] = ()
    if "fc_norm.0.weight" in checkpoint:
        indices = range(max(len(config.aux_layers), 1))
        eps = config.llama.rms_norm_eps
        norms = tuple(RMSNorm(checkpoint.take(f"fc_norm.{index}.weight", (width,)), eps) for index in indices)
    if config.norms_all:
        weight = checkpoint.take("input_norm.weight", (config.fused_size,))
        norms = (RMSNorm(weight, config.llama.rms_norm_eps),)
    if config.fused_size == hidden and "fc.weight" not in checkpoint:
        return Eagle3Fusion(norms, None)
    weight = take_matrix(checkpoint, "fc", (hidden, config.fused_size))
    has_bias = config.fc_bias or "fc.bias" in checkpoint
    return Eagle3Fusion(norms, make_linear(weight, checkpoint.take("fc.bias", (hidden,)) if has_bias else None))


def _load_mask(config: Eagle3Config, checkpoint: Weights, fusion: Eagle3Fusion, target: LoadedTarget) -> MaskRow | None:
    """The mask row of a P-EAGLE head, its features as `fusion` makes them of any row's."""
    if MASK not in checkpoint and not config.is_parallel:
        return None
    token, size = config.mask_token, config.fused_size
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise CheckpointError(
            f"{config.llama.origin}: {' or '.join(MASK_KEYS)}: found {token!r}, expected 0 to {target.vocab_size - 1}:"
            f" the token of mask rows, which the head has ({MASK})"
        )
    hidden = checkpoint.take(MASK, (1, 1, size)).view(1, size)
    return MaskRow(token, fusion(TargetOutput(hidden, hidden)).view(-1))


def _load_layers(
    config: Eagle3Config, checkpoint: Weights, token_norm: RMSNorm, rank: Rank
) -> tuple[PreNormLayer, ...]:
    """Take all layers, divided as the target is. In few bits, or of sizes that do not divide, each rank has them all.

    Not divided: fusion, embedding and head, whose results each rank needs whole.
    """
    llama, parts = config.llama, dict[str, Part]()
    if rank.ranks > 1 and checkpoint.scheme is None:
        with suppress(CheckpointError):
            llama, parts = divided_llama(llama, llama.origin, rank)
    with dividing(checkpoint, rank, parts):
        return tuple(_load_layer(llama, checkpoint, index, token_norm) for index in range(llama.num_layers))


def _load_layer(llama: LlamaConfig, checkpoint: Weights, index: int, token_norm: RMSNorm) -> PreNormLayer:
    """Take one layer. The first reads embedding and features, concatenated; the others are ordinary.

    Their first norm is called `hidden_norm` or `input_layernorm`; if a layer has both, it is `hidden_norm`.
    """
    hidden, shape = llama.hidden_size, llama.attention_shape(llama.windows[index])
    if index == 0:
        return load_layer(llama, checkpoint, index, shape, 2 * hidden, token_norm)
    norm = "hidden_norm" if f"layers.{index}.hidden_norm.weight" in checkpoint else "input_layernorm"
    checkpoint.skip(f"layers.{index}.input_layernorm.weight")
    return load_layer(llama, checkpoint, index, shape, hidden, norm)


def _load_embedding(config: Eagle3Config, checkpoint: Weights, target: LoadedTarget) -> Embedding:
    """The target's embedding, unless the head has another width, trained its own, or uses that as output."""
    name, hidden = "embed_tokens.weight", config.llama.hidden_size
    is_own = name in checkpoint and (MASK in checkpoint or config.own_embedding)
    if hidden == target.hidden_size and not config.llama.tie_word_embeddings and not is_own:
        checkpoint.skip(name)
        return target.embedding
    return take_embedding(checkpoint, target.vocab_size, hidden)


def _load_head(config: Eagle3Config, checkpoint: Weights, target: LoadedTarget, embedding: Embedding) -> AnyLinear:
    name, hidden = "lm_head.weight", config.llama.hidden_size
    if config.llama.tie_word_embeddings:
        checkpoint.skip(name)
        return embedding.tied_head()
    if config.draft_vocab_size is not None:
        return Linear(checkpoint.take(name, (config.draft_vocab_size, hidden)))
    if hidden != target.hidden_size:
        raise CheckpointError(
            f"{config.llama.origin}: draft_vocab_size is null, which means the target's head, but that reads"
            f" hidden states of {target.hidden_size} and this head makes {hidden}"
        )
    checkpoint.skip(name)
    return target.head


def _load_target_ids(checkpoint: Weights, head: AnyLinear, target: LoadedTarget) -> Tensor:
    """Draft id -> target id. The checkpoint stores offsets: target id = draft id + d2t[draft id]."""
    rows, device = head.out_features, head.device
    ids = torch.arange(rows)
    if "d2t" not in checkpoint:
        if rows != target.vocab_size:
            raise CheckpointError(
                f"{checkpoint.origin}: tensor d2t is missing: the head guesses {rows} tokens of the target's"
                f" {target.vocab_size}, expected d2t of shape [{rows}]"
            )
        return ids.to(device)
    found = checkpoint.shape("d2t")
    if found != (rows,):
        raise CheckpointError(
            f"{checkpoint.file_of('d2t')}: tensor d2t: found shape {list(found)}, expected [{rows}], one entry per row"
            " of the head"
        )
    offsets = checkpoint.take_raw("d2t", found)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise CheckpointError(
            f"{checkpoint.file_of('d2t')}: tensor d2t: found type {type_name(offsets.dtype)}, expected int64 or int32"
        )
    if offsets.is_meta:
        return offsets.to(torch.int64)
    ids += offsets.to(torch.int64)
    if ids.min() < 0 or ids.max() >= target.vocab_size:
        raise CheckpointError(
            f"{checkpoint.file_of('d2t')}: tensor d2t: found target ids {int(ids.min())} to {int(ids.max())},"
            f" expected 0 to {target.vocab_size - 1}, the target's vocabulary"
        )
    return ids.to(device)
