"""A Llama-family target: embedding, layers, final norm, head.

    stream --> norm --> attention --> + --> norm --> mlp --> + --> stream of the next layer

A map that adds to the stream hands it to the norm after it (`Normed`), so the stream after a layer is there for
aux_hidden to read, at no cost.
"""

from dataclasses import dataclass, fields, is_dataclass

import torch
import torch.nn.functional as F
from overlap_spec_kernels import DecodeScratch, Normed
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.attention import PagedAttention
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.head_norm import HeadNormLinear
from overlap_spec.models.layers.linear import AnyLinear, GatedMLP, HeadLogits, Linear, RMSNorm
from overlap_spec.models.targets.llama_config import LlamaConfig
from overlap_spec.models.work import ForwardWork, llama_work


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer."""

    input_norm: RMSNorm
    qkv: AnyLinear | HeadNormLinear  # [(n + 2 nkv) d, H]
    output: AnyLinear  # [H, n d]
    post_norm: RMSNorm
    mlp: GatedMLP


@dataclass(frozen=True)
class LlamaWeights:
    """A loaded target (`LoadedTarget`): everything but a cache and positions."""

    config: LlamaConfig
    embedding: Tensor  # [V, H]
    layers: tuple[LlamaLayer, ...]
    norm: RMSNorm
    head: Linear  # [V, H]; shares the embedding's memory where the checkpoint ties them

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Layers that a draft head may tap."""
        return self.config.num_layers

    @property
    def kv_shape(self) -> KVShape:
        """What a token takes in the target's cache."""
        return self.config.kv_shape

    @property
    def num_bytes(self) -> int:
        """Memory of the weights; shared tensors count once."""
        return count_bytes(self)

    @property
    def work(self) -> ForwardWork:
        """What a forward reads and computes; the embedding is only gathered from."""
        config, head = self.config, self.head.weight
        read = count_bytes((self.layers, self.norm, self.head))
        return llama_work(
            read, head.nbytes, self.embedding.itemsize, config.num_heads * config.head_dim, config.num_layers
        )

    def attach(
        self,
        cache: KVCache,
        num_positions: int,
        aux_layers: tuple[int, ...] = (),
        attention: AttentionChoice = DEFAULT_ATTENTION,
    ) -> "LlamaTarget":
        """Join weights, cache and a rotary table of `num_positions` rows."""
        paged = paged_attention_for(self.config, self.embedding, cache, num_positions, attention)
        return LlamaTarget(self, paged, aux_layers)


class LlamaTarget:
    """`TargetModel` of the Llama family."""

    def __init__(self, weights: LlamaWeights, attention: PagedAttention, aux_layers: tuple[int, ...]) -> None:
        assert list(aux_layers) == sorted(set(aux_layers)), "aux_hidden are distinct and ascending"
        assert all(0 <= layer < weights.num_layers for layer in aux_layers), "a tap is the output of a layer"
        self.hidden_size = weights.hidden_size
        self.vocab_size = weights.vocab_size
        self._weights = weights
        self._attention = attention
        self._aux_layers = frozenset(aux_layers)

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        """Run all layers. Shapes: tokens [T] i64. Sync: never on CUDA."""
        layers = self._weights.layers
        next_norms = [layer.input_norm for layer in layers[1:]] + [self._weights.norm]
        stream = layers[0].input_norm.enter(self.embed(tokens))
        aux_hidden: list[Tensor] = []
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            # The embedding is looked up by no dependent launch: what was written before it is settled.
            attended = self._attention(index, layer.qkv(stream), rows, settled=True)
            stream = layer.mlp.add(layer.output.add(attended, stream.values, layer.post_norm), next_norm)
            if index in self._aux_layers:
                aux_hidden.append(stream.values)
        return TargetOutput(
            stream, torch.cat(aux_hidden, dim=1) if aux_hidden else stream.values.new_empty(len(tokens), 0)
        )

    def logits(self, hidden: Tensor | Normed) -> LazyLogits:
        """Shapes: hidden [R, H] -> logits [R, V]."""
        return HeadLogits(self._weights.head, hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens [R] i64 -> [R, H]."""
        return F.embedding(tokens, self._weights.embedding)


def paged_attention_for(
    config: LlamaConfig, like: Tensor, cache: KVCache, num_positions: int, attention: AttentionChoice
) -> PagedAttention:
    """The attention of a model with this config; `like` gives dtype and device."""
    cos_sin = config.rope.table(num_positions, like.dtype, like.device)
    num_programs = None if like.is_cuda else 1
    scratch = DecodeScratch.allocate(config.head_dim, like.device, num_programs)
    asked = attention.windows(config.windows)
    # A window that no position reaches the end of leaves out nothing, and costs something.
    windows = tuple(None if window is None or window >= num_positions else window for window in asked)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    return PagedAttention(cache, cos_sin, *heads, scratch, windows, attention)


def count_bytes(weights: object) -> int:
    """Memory of all tensors below a tree of dataclasses and tuples, shared ones counted once."""
    return sum(tensor.nbytes for tensor in {_address(tensor): tensor for tensor in _tensors(weights)}.values())


def _address(tensor: Tensor) -> int:
    """Where a tensor's memory is; one in an opaque layout shares it with nobody."""
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def _tensors(node: object) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, tuple):
        return [tensor for child in node for tensor in _tensors(child)]
    if is_dataclass(node):
        return [tensor for field in fields(node) for tensor in _tensors(getattr(node, field.name))]
    return []
