"""A Llama-family target: embedding, layers, final norm, head. Not here: reading checkpoints (`loader.py`).

    stream --> norm --> attention --> + --> norm --> mlp --> + --> stream of the next layer

The additions are folded into the norms after them, so the stream after layer i appears as a by-product of
layer i + 1's first norm; that is where taps read it, at no cost.
"""

from dataclasses import dataclass, fields, is_dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec.models.attention import PagedAttention
from overlap_spec.models.interfaces import RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers import GatedMLP, Linear, LinearMap, RMSNorm
from overlap_spec.models.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer."""

    input_norm: RMSNorm
    qkv: LinearMap  # [(n + 2 nkv) d, H]
    output: LinearMap  # [H, n d]
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

    def attach(self, cache: KVCache, num_positions: int, aux_layers: tuple[int, ...] = ()) -> "LlamaTarget":
        """Join weights, cache and a rotary table of `num_positions` rows."""
        return LlamaTarget(self, paged_attention_for(self.config, self.embedding, cache, num_positions), aux_layers)


class LlamaTarget:
    """`TargetModel` of the Llama family."""

    def __init__(self, weights: LlamaWeights, attention: PagedAttention, aux_layers: tuple[int, ...]) -> None:
        assert list(aux_layers) == sorted(set(aux_layers)), "taps are distinct and ascending"
        assert all(0 <= layer < weights.num_layers for layer in aux_layers), "a tap is the output of a layer"
        self.hidden_size = weights.hidden_size
        self.vocab_size = weights.vocab_size
        self._weights = weights
        self._attention = attention
        self._aux_layers = frozenset(aux_layers)

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        """Run all layers. Shapes: tokens [T] i64. Sync: never on CUDA."""
        stream = self.embed(tokens)
        taps: list[Tensor] = []
        x: Tensor | None = None  # what the layer before adds to the stream
        for index, layer in enumerate(self._weights.layers):
            if x is None:
                x = layer.input_norm(stream)
            else:
                x, stream = layer.input_norm.add(x, stream)
                self._tap(index - 1, stream, taps)
            x = layer.output(self._attention(index, layer.qkv(x), rows))
            x, stream = layer.post_norm.add(x, stream)
            x = layer.mlp(x)
        assert x is not None, "a model has layers"
        hidden, stream = self._weights.norm.add(x, stream)
        self._tap(len(self._weights.layers) - 1, stream, taps)
        return TargetOutput(hidden, torch.cat(taps, dim=1) if taps else hidden.new_empty(hidden.shape[0], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [R, H] -> [R, V], float32 or wider."""
        return widen(self._weights.head(hidden))

    def embed(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens [R] i64 -> [R, H]."""
        return F.embedding(tokens, self._weights.embedding)

    def _tap(self, layer: int, stream: Tensor, taps: list[Tensor]) -> None:
        if layer in self._aux_layers:
            taps.append(stream)


def widen(logits: Tensor) -> Tensor:
    """Logits are compared and sampled in float32 or wider."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def paged_attention_for(config: LlamaConfig, like: Tensor, cache: KVCache, num_positions: int) -> PagedAttention:
    """The attention of a model with this config; `like` gives dtype and device."""
    cos_sin = config.rope.table(num_positions, like.dtype, like.device)
    return PagedAttention(cache, cos_sin, config.num_heads, config.num_kv_heads, config.head_dim)


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
