"""Layers that recur in the place of attention: Gated DeltaNet and Mamba-2.

    x --> q, k, v: short causal convolution over the last K tokens, SiLU
    x --> of each head a decay a and a rate b
    S <-- a S + k u^T                        S [dk, dv] of a head: what it remembers
    out = S^T q, normalised, gated by SiLU(z), then a linear

    Gated DeltaNet (Yang et al. 2025, arXiv:2412.06464): q and k have length 1, then q / sqrt(dk)
        a = exp(-A softplus(. + dt)), b = sigmoid(.), u = b (v - (a S)^T k)
    Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): C, B and x are its q, k and v; D v is added to what is found
        b = softplus(. + dt), a = exp(-A b), u = b v: nothing of what k finds is taken away

Windows of decode take the recurrence token by token; how rejected ones leave no trace is told in `recurrent_state.py`.
Prompts take its form by chunks (section 3.3 of the first paper, 6 of the second, which solves no system), which
multiplies matrices. Chunks end at multiples of 64 positions, so a prompt that is cut at such places keeps its bits.

**Order of sums.** A window of any width, in any batch, must have the bits of plain decoding. So sums over dk are added
up in halves, by operations on single elements, each of which is rounded as it is alone.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Normed
from overlap_spec_kernels.launch import runs_triton
from overlap_spec_kernels.norm.silu_mul import sigmoid, silu, softplus
from overlap_spec_kernels.recurrent.gated_delta import DeltaRows, DeltaState, DeltaWeights, gated_delta
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.layers.decoder import Attend, Projection
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.norm import Norm
from overlap_spec.models.recurrent_state import CHUNK, LayerState, StateShape
from overlap_spec.models.work import ForwardWork, product_work, total_work

EPS = 1e-6  # beneath the lengths of queries and keys


class TokenRows(NamedTuple):
    """What the recurrence takes of tokens. Shapes: leading ones are any; n heads, in float32 or wider."""

    q: Tensor  # [.., n, dk]; of Gated DeltaNet of length 1 / sqrt(dk)
    k: Tensor  # [.., n, dk]; of Gated DeltaNet of length 1
    v: Tensor  # [.., n, dv]
    log_decay: Tensor  # [.., n], at most 0
    decay: Tensor  # [.., n], its exponential
    rate: Tensor  # [.., n], b

    def at(self, *index: slice | int) -> "TokenRows":
        """Some of the tokens."""
        return TokenRows(*(each[index] for each in self))


@dataclass(frozen=True, slots=True)
class GatedHeadNorm:
    """The norm of each head, times SiLU of a gate, in float32 or wider and rounded once."""

    weight: Tensor  # [dv], f32 or f64
    eps: float

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        return product_work(self.weight.nbytes, self.weight.numel())

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Shapes: [T, n dv] both -> the same."""
        wide, size = self.weight.dtype, len(self.weight)
        normed = F.rms_norm(x.to(wide).view(len(x), -1, size), (size,), self.weight, self.eps).flatten(1)
        return (normed * silu(gate.to(wide))).to(x.dtype)


@dataclass(frozen=True, slots=True)
class GatedRowNorm(GatedHeadNorm):
    """The norm of a row that was multiplied by SiLU of its gate, over all heads; its weight is [n dv]."""

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = self.weight.dtype
        return F.rms_norm(x.to(wide) * silu(gate.to(wide)), self.weight.shape, self.weight, self.eps).to(x.dtype)


NO_NORM = GatedHeadNorm(torch.empty(0), 0.0)


@dataclass(frozen=True)
class RecurrentShape(StateShape, ABC):
    """The sizes of a layer and the weights between its linears. A projected row is [q, k, v, gates, z].

    S <-- a S + k u^T, where a class tells the u that a token adds; out = S^T q, in some layers with a part of v.
    """

    num_key_heads: int = 1  # of queries and keys; each is that of n / m neighbours
    conv: Tensor = field(default=torch.empty(0), compare=False)  # [C, K]
    steepness: Tensor = field(default=torch.empty(0), compare=False)  # [n] A, f32 or f64
    offset: Tensor = field(default=torch.empty(0), compare=False)  # [n] dt, f32 or f64
    norm: GatedHeadNorm = field(default=NO_NORM, compare=False)  # of what is found, with the gate z
    bias: Tensor | None = field(default=None, compare=False)  # [C], of the convolution
    skip: Tensor | None = field(default=None, compare=False)  # [n] f32 or f64: how much of v is added to what is found

    num_products: ClassVar[int]  # with the state, of a token

    @property
    def num_values(self) -> int:
        """Columns of what is found, and of z."""
        return self.num_heads * self.value_dim

    def rows(self, history: Tensor, gates: Tensor) -> TokenRows:
        """What the recurrence takes of T tokens. Shapes: history [B, K - 1 + T, C], gates [B, T, g n] -> [B, T, ..]."""
        mixed = _convolved(history, self.conv, self.bias, gates.shape[1]).to(self.steepness.dtype)
        sizes = (self.num_key_heads * self.key_dim,) * 2 + (self.num_heads * self.value_dim,)
        q, k, v = (part.unflatten(2, (heads, -1)) for part, heads in zip(
            mixed.split(sizes, dim=2), (self.num_key_heads, self.num_key_heads, self.num_heads), strict=True
        ))  # fmt: skip
        return self.of_tokens(q, k, v, gates.to(mixed.dtype))

    @abstractmethod
    def of_tokens(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> TokenRows:
        """Shapes: q, k [B, T, m, dk], v [B, T, n, dv], gates [B, T, g n] -> [B, T, ..]."""

    @abstractmethod
    def added(self, decayed: Tensor, token: TokenRows) -> Tensor:
        """What a token adds to a state. Shapes: decayed [B, n, dk, dv], token [B, ..] -> [B, n, dv]."""

    @abstractmethod
    def added_in_chunk(
        self, memory: Tensor, since: Tensor, k: Tensor, v: Tensor, rate: Tensor, between: Tensor
    ) -> Tensor:
        """The same of each token of a chunk. `since`: decays since the state before it, `between`: those of pairs.

        Shapes: [n, dk, dv], [n, T, 1], [n, T, dk], [n, T, dv], [n, T, 1], [n, T, T] -> [n, T, dv].
        """

    def advance(self, memory: Tensor, token: TokenRows) -> Tensor:
        """The state after one more token, rounded to the type in which it is kept.

        Shapes: memory [B, n, dk, dv], token [B, ..] -> as memory.
        """
        decayed = memory.to(token.k.dtype) * token.decay[..., None, None]
        learnt = self.added(decayed, token)
        return (decayed + token.k[..., None] * learnt[..., None, :]).to(memory.dtype)

    def read(self, memory: Tensor, token: TokenRows) -> Tensor:
        """Shapes: memory [B, n, dk, dv], token [B, ..] -> [B, n, dv]."""
        return self._with_values(halved_sum(memory.to(token.q.dtype) * token.q[..., None], -2), token.v)

    def run_chunk(self, memory: Tensor, tokens: TokenRows) -> tuple[Tensor, Tensor]:
        """The state after T tokens, and what each of them reads, by products of matrices.

        Copies begin where memory is aligned: a BLAS adds up in another order elsewhere.
        Shapes: memory [n, dk, dv] -> the same, [T, n, dv].
        """
        q, k, v = (part.transpose(0, 1).clone(memory_format=torch.contiguous_format) for part in tokens[:3])
        passed, rate = tokens.log_decay.t().cumsum(1), tokens.rate.t()[..., None]
        between = (passed[:, :, None] - passed[:, None]).tril().exp().tril()
        wide, since = memory.clone().to(q.dtype), passed.exp()[..., None]
        added = self.added_in_chunk(wide, since, k, v, rate, between)
        out = since * (q @ wide) + ((q @ k.transpose(1, 2)) * between) @ added
        left = (passed[:, -1:] - passed).exp()[..., None]
        after = wide * passed[:, -1].exp()[:, None, None] + (left * k).transpose(1, 2) @ added
        return after.to(memory.dtype), self._with_values(out.transpose(0, 1), tokens.v)

    def _with_values(self, found: Tensor, v: Tensor) -> Tensor:
        return found if self.skip is None else found + self.skip[:, None] * v


@dataclass(frozen=True)
class DeltaShape(RecurrentShape):
    """Gated DeltaNet's: the gates are rates, then decays."""

    num_products: ClassVar[int] = 3

    def of_tokens(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> TokenRows:
        copies = self.num_heads // self.num_key_heads
        q, k = (_unit(part).repeat_interleave(copies, dim=2) for part in (q, k))
        rate, step = gates.chunk(2, dim=2)
        log_decay = -self.steepness * softplus(step + self.offset)
        return TokenRows(q * self.key_dim**-0.5, k, v, log_decay, log_decay.exp(), sigmoid(rate))

    def added(self, decayed: Tensor, token: TokenRows) -> Tensor:
        known = halved_sum(decayed * token.k[..., None], -2)
        return (token.v - known) * token.rate[..., None]

    def added_in_chunk(
        self, memory: Tensor, since: Tensor, k: Tensor, v: Tensor, rate: Tensor, between: Tensor
    ) -> Tensor:
        """They depend on each other: u solves (I + L) u = b (v - decayed S^T k).

        L holds, below its diagonal, products of keys with the decay between them.
        """
        products = rate * (k @ k.transpose(1, 2)) * between
        target = rate * (v - since * (k @ memory))
        added: Tensor = torch.linalg.solve_triangular(products, target, upper=False, unitriangular=True)
        return added


@dataclass(frozen=True)
class Mamba2Shape(RecurrentShape):
    """Mamba-2's: the one gate of a head is its step, which is the rate at which it learns, too."""

    num_products: ClassVar[int] = 2

    def of_tokens(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> TokenRows:
        copies = self.num_heads // self.num_key_heads
        step = softplus(gates + self.offset)
        log_decay = -self.steepness * step
        q, k = (part.repeat_interleave(copies, dim=2) for part in (q, k))
        return TokenRows(q, k, v, log_decay, log_decay.exp(), step)

    def added(self, decayed: Tensor, token: TokenRows) -> Tensor:
        return token.v * token.rate[..., None]

    def added_in_chunk(
        self, memory: Tensor, since: Tensor, k: Tensor, v: Tensor, rate: Tensor, between: Tensor
    ) -> Tensor:
        return rate * v


def _convolved(history: Tensor, weight: Tensor, bias: Tensor | None, num_tokens: int) -> Tensor:
    """SiLU of the causal convolution of the last rows. Shapes: [B, K - 1 + T, C], [C, K], [C] -> [B, T, C]."""
    kernel = weight.shape[1]
    found = history[:, :num_tokens] * weight[:, 0]
    for offset in range(1, kernel):
        found = found + history[:, offset : offset + num_tokens] * weight[:, offset]
    return silu(found if bias is None else found + bias)


def _unit(x: Tensor) -> Tensor:
    """Shapes: [.., d] -> the same, of length 1."""
    return x * torch.rsqrt(halved_sum(x * x, -1) + EPS).unsqueeze(-1)


def halved_sum(x: Tensor, dim: int) -> Tensor:
    """The sum along `dim`, halves added to each other: its order depends on the size alone."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat((folded, x.narrow(dim, 2 * half, 1)), dim) if size % 2 else folded
    return x.squeeze(dim)


def run_windows(shape: RecurrentShape, state: LayerState, projected: Tensor, rows: RowBatch) -> Tensor:
    """Windows, none of whose rows is in the state yet: what was accepted of the last ones is repeated before.

    Shapes: projected [B * w, R] -> [B * w, n dv].
    """
    assert rows.state is not None
    slots, width = rows.state.slots, rows.max_rows
    starts, window = rows.positions.view(-1, width)[:, 0], projected.view(len(slots), width, -1)
    pending, most = state.window[slots], state.window.shape[1]
    accepted = (starts - state.position[slots]).clamp(0, most)
    if not accepted.is_cuda:
        most = int(accepted.max())
    history = torch.cat((state.inputs[slots], pending[..., : shape.conv_dim]), dim=1)
    tokens, memory = shape.rows(history, pending[..., shape.conv_dim :]), state.memory[slots]
    for column in range(most):
        is_accepted = (column < accepted)[:, None, None, None]
        memory = torch.where(is_accepted, shape.advance(memory, tokens.at(slice(None), column)), memory)
    last = accepted[:, None] + torch.arange(shape.kernel - 1, device=accepted.device)
    inputs = history.gather(1, last[..., None].expand(-1, -1, shape.conv_dim))
    state.memory[slots], state.inputs[slots], state.position[slots] = memory, inputs, starts
    state.window[slots, :width] = window
    history = torch.cat((inputs, window[..., : shape.conv_dim]), dim=1)
    tokens, found = shape.rows(history, window[..., shape.conv_dim :]), []
    for column in range(width):
        token = tokens.at(slice(None), column)
        memory = shape.advance(memory, token)
        found.append(shape.read(memory, token))
    return torch.stack(found, dim=1).flatten(0, 1).flatten(1).to(projected.dtype)


def run_prompts(shape: RecurrentShape, state: LayerState, projected: Tensor, rows: RowBatch) -> Tensor:
    """Chunks of prompts, each of which goes on from its slot's state; at position 0 from an empty one.

    Shapes: projected [T, R] -> [T, n dv]. Sync: reads on the host where chunks begin.
    """
    assert rows.state is not None and rows.row_starts is not None
    slots, row_starts = map(int, rows.state.slots.numpy()), list(map(int, rows.row_starts.numpy()))
    found = projected.new_zeros(len(projected), shape.num_heads * shape.value_dim)
    for slot, begin, end in zip(slots, row_starts, row_starts[1:], strict=False):
        if begin == end:
            continue
        start, chunk = int(rows.positions[begin]), projected[None, begin:end]
        memory, inputs = state.memory[slot], state.inputs[None, slot]
        if start == 0:
            memory, inputs = torch.zeros_like(memory), torch.zeros_like(inputs)
        history = torch.cat((inputs, chunk[..., : shape.conv_dim]), dim=1)
        tokens = shape.rows(history, chunk[..., shape.conv_dim :]).at(0)
        cut, first_drawn = 0, end - begin if rows.state.drawn is None else int(rows.state.drawn[0])
        while cut < end - begin:
            if cut >= first_drawn:
                until = cut + 1
                token = tokens.at(slice(cut, until))
                memory = shape.advance(memory[None], token)[0]
                out = shape.read(memory[None], token)
            else:
                until = min(cut + CHUNK - (start + cut) % CHUNK, first_drawn)
                memory, out = shape.run_chunk(memory, tokens.at(slice(cut, until)))
            found[begin + cut : begin + until] = out.flatten(1).to(found.dtype)
            cut = until
        state.memory[slot], state.inputs[slot] = memory, history[0, -(shape.kernel - 1) :]
        state.position[slot] = start + end - begin
    return found


def recur(shape: RecurrentShape, state: LayerState, projected: Tensor, rows: RowBatch) -> Tensor:
    """What rows of one part find. Shapes: projected [T, R] -> [T, n dv]."""
    assert rows.state is not None and rows.tree is None, "a layer with a state runs chains of its slots"
    return (run_prompts if rows.state.are_final else run_windows)(shape, state, projected, rows)


def recurred(
    shape: RecurrentShape, state: LayerState, projected: Tensor, rows: RowBatch, gates: Tensor | None = None
) -> Tensor:
    """What rows of one part find, past norm and gate. `gates`: rates and decays, if `projected` is without them.

    Shapes: projected [T, R + n dv], gates [T, g n] -> [T, n dv], [B, n dv] with `rows.read`. Sync: never on CUDA.
    """
    assert rows.state is not None and rows.tree is None, "a layer with a state runs chains of its slots"
    if gates is not None and not runs_triton(projected):
        mixed, gate = projected.split((shape.conv_dim, shape.num_values), dim=1)
        projected, gates = torch.cat((mixed, gates, gate), dim=1), None
    if runs_triton(projected):
        kept = DeltaState(state.memory, state.inputs, state.window, state.position)
        weights = DeltaWeights(
            *(shape.conv, shape.steepness, shape.offset, shape.norm.weight),
            eps=shape.norm.eps,
            num_key_heads=shape.num_key_heads,
            bias=shape.bias,
            skip=shape.skip,
        )
        prompt = rows.row_starts if rows.state.prompt is None else rows.state.prompt
        places = (rows.state.slots, rows.positions, prompt if rows.state.are_final else None, rows.max_rows)
        found = gated_delta(kept, weights, DeltaRows(projected, *places, gates, rows.state.drawn))
    else:
        columns, gate = projected.split((shape.row_size, shape.num_values), dim=1)
        found = shape.norm(recur(shape, state, columns, rows), gate)
    return found if rows.read is None else found[rows.read.index]


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """`Attention` of a layer that recurs."""

    inputs: (
        AnyLinear  # [R + n dv, H]: what is convolved, rates and decays, the gate z; without the former if `gates` are
    )
    output: AnyLinear  # [H, n dv]
    shape: RecurrentShape
    gates: AnyLinear | None = None  # [2 n, H]: rates, then decays, stored in more bits

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes: of a token products with the state, whose bytes a slot has."""
        shape = self.shape
        recurred = ForwardWork(row_flop=2 * shape.num_products * shape.num_heads * shape.key_dim * shape.value_dim)
        convolved = product_work(shape.conv.nbytes, shape.conv.numel())
        linears = [linear.work for linear in (self.inputs, self.gates, self.output) if linear is not None]
        return total_work((*linears, convolved, recurred, shape.norm.work))

    @property
    def keys_values(self) -> Projection:
        """There are none."""
        raise AssertionError("a layer that recurs has no keys and values")

    def __call__(self, x: Normed, attend: Attend) -> Tensor:
        return self.output(self._recurred(x, attend))

    def add(self, x: Normed, norm: Norm, attend: Attend) -> Normed:
        return norm.join(self.output, self._recurred(x, attend), attend.kept(x.values), attend.takes)

    def _recurred(self, x: Normed, attend: Attend) -> Tensor:
        """What the last linear reads. Shapes: [T, H] -> [R, n dv]."""
        projected, gates = (self.inputs(x), None) if self.gates is None else self.inputs.beside(x, self.gates)
        return attend.recurred(projected, gates)
