"""Parts of layers that Gemma 4 alone has; its assistant, which drafts, has some of them too."""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import Norm as KernelNorm, Normed, Routing, add_normed, norm_all_heads, normalised
from overlap_spec_kernels.norm.silu_mul import gelu_tanh
from torch import Tensor

from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import Attend, PostNormLayer
from overlap_spec.models.layers.embedding import Embedding
from overlap_spec.models.layers.experts import MixtureMLP
from overlap_spec.models.layers.linear import AnyLinear, WrappedHead
from overlap_spec.models.layers.norm import Norm, WideRMSNorm
from overlap_spec.models.work import ForwardWork, total_work


@dataclass(frozen=True, slots=True)
class HeadsLinear:
    """`Projection` whose heads are normalised: values too, without a weight. Heads of values may be those of keys."""

    linear: AnyLinear  # of queries and keys, and of values where those have rows of their own; or of queries alone
    query: WideRMSNorm  # [d]
    key: WideRMSNorm | None  # [d]; None: another layer has keys and values
    shape: AttentionShape

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        norms = self.query.work if self.key is None else self.query.work + self.key.work
        return self.linear.work + norms

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, (n + 2 nkv) d], [T, n d] of queries alone."""
        heads, shape = self.linear(x), self.shape
        if self.key is None:
            return self.query(heads.unflatten(1, (-1, shape.head_dim))).flatten(1)
        weights = self.query.weight, self.key.weight
        return norm_all_heads(heads, *weights, shape.num_heads, shape.num_kv_heads, self.key.eps)


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """`LayerInputs`: rows of a second embedding, and what a linear makes of the first one's."""

    embedding: Embedding  # [V, L P]
    linear: AnyLinear  # [L P, H]
    norm: WideRMSNorm  # [P]

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes; of the embedding a row a token."""
        return self.linear.work + self.norm.work

    def __call__(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Shapes: tokens [T] i64, embedded [T, H] -> [T, L, P]."""
        by_layer = (-1, len(self.norm.weight))
        of_context = self.norm((self.linear(embedded) * embedded.shape[1] ** -0.5).unflatten(1, by_layer))
        both: Tensor = of_context + self.embedding(tokens).unflatten(1, by_layer)
        return both * 2**-0.5


@dataclass(frozen=True, slots=True)
class TokenMLP:
    """What a layer adds of its rows' tokens, behind the MLP."""

    gate: AnyLinear  # [P, H]
    up: AnyLinear  # [H, P]
    norm: Norm  # [H]

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        return self.gate.work + self.up.work + self.norm.work

    def __call__(self, x: Tensor, added: Tensor) -> Tensor:
        """What its norm is of. Shapes: x [T, H], added [T, P] -> [T, H]."""
        return self.up(gelu_tanh(self.gate(x)) * added)


def added(x: Tensor, residual: Tensor, inner: Norm, outer: Norm, factor: Tensor | None = None) -> Normed:
    """The residual and the norm of x, times a factor, and the norm of that: one kernel if it has both norms."""
    if isinstance(inner, WideRMSNorm) and isinstance(outer, WideRMSNorm):
        norms = KernelNorm(inner.weight, inner.eps), KernelNorm(outer.weight, outer.eps)
        rows, values = add_normed(x, residual, *norms, factor)
        return Normed(values, rows)
    values = residual + inner(x)
    return outer.enter(values if factor is None else values * factor)


@dataclass(frozen=True, slots=True)
class ScaledLayer(PostNormLayer):
    """A layer with norms behind attention and MLP, whose whole result is scaled."""

    scalar: Tensor  # [1]
    of_tokens: TokenMLP | None

    @property
    def work(self) -> ForwardWork:
        norms = (self.input_norm, self.attention_norm, self.mlp_norm, self.output_norm)
        parts = (*norms, self.attention, self.mlp, *(() if self.of_tokens is None else (self.of_tokens,)))
        return total_work(part.work for part in parts)

    def __call__(self, x: Normed, next_norm: Norm, attend: Attend) -> Normed:
        x = added(self.attention(x, attend), attend.kept(x.values), self.attention_norm, self.mlp_norm)
        output, of_tokens = self.mlp(x), attend.added
        if self.of_tokens is None:
            return added(output, x.values, self.output_norm, next_norm, self.scalar)
        assert of_tokens is not None, "the model gives its layers rows of a second embedding"
        values = x.values + self.output_norm(output)
        return added(self.of_tokens(values, of_tokens), values, self.of_tokens.norm, next_norm, self.scalar)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseAndRouted(MixtureMLP):
    """A dense MLP, which is `shared`, beside experts that read the residual by norms of their own.

    An expert's weight is its share of a row's probability, times a number of the expert.
    """

    factors: Tensor  # [E] f32, or f64 of a float64 model
    router_norm: Norm
    routed_norm: Norm  # before the experts
    dense_output_norm: Norm
    routed_output_norm: Norm

    def __call__(self, x: Normed) -> Tensor:
        """Shapes: the residual, and what the dense MLP reads, [T, H] -> [T, H]."""
        assert self.shared is not None
        dense = self.dense_output_norm(self._of_shared(self.shared, x, normalised(x)))
        experts, weights = self._route(self.router_norm(x.values))
        routing = Routing(experts, weights * self.factors[experts])
        return dense + self.routed_output_norm(self.experts(self.routed_norm(x.values), routing))


@dataclass(frozen=True, slots=True)
class CappedHead(WrappedHead):
    """A head whose logits stay within a bound: cap * tanh(logits / cap)."""

    cap: float

    def rows(self, ids: Tensor | slice) -> AnyLinear:
        return CappedHead(self.head.rows(ids), self.cap)

    def _changed(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits / self.cap) * self.cap
