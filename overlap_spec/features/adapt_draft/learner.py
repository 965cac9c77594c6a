"""A copy of an EAGLE-3 head that is trained on what the target computed, and the head that serves, in place.

    live      the head's own tensors, where captured graphs read them; they are written, never replaced
    copy      its parameters in float32, with gradients and two moments: what is trained (`train_draft`'s loss)
    before    what was live before the last take-over, in the head's own type

Nothing here waits for the device: places of a loss come from tokens, which the host has, and a step whose gradients are
not finite is multiplied by 0 on the device.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap_spec.errors import ConfigError
from overlap_spec.models.drafts.eagle3 import Eagle3Weights
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.decoder import SelfAttention
from overlap_spec.models.layers.linear import FEW_ROWS, DenseLinear
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.norm import RMSNorm
from overlap_spec.train_draft.eagle3 import LAYER, STEPS, Eagle3
from overlap_spec.train_draft.head import Batch, Frozen, Tensors

FLAG = "adapt_draft"
RATE, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.01, 1.0
WIDE = 1024  # hidden sizes above it learn in smaller steps
WARM_UP = 20  # steps
EVERYTHING = slice(None)
ROUNDED = 64  # lengths of batches: each has kernels of its own, which a GPU loads when it meets it first


def check_learns(weights: object, target: LoadedTarget) -> Eagle3Weights:
    """Raises: ConfigError if this head is not what the trainer knows: one layer, as SpecForge trains it."""
    if not isinstance(weights, Eagle3Weights):
        raise ConfigError(FLAG, f"an EAGLE-3 head that guesses chains can learn, not a {type(weights).__name__}")
    config, layers = weights.config, weights.layers
    attention, mlp = layers[0].attention, layers[0].mlp
    odd = {
        "layers beside the first": len(layers) > 1,
        "no aux layers, or norms of them": not config.aux_layers or bool(weights.fusion.norms),
        "no fc": weights.fusion.fc is None,
        "norm_output, or norm_before_residual": config.norm_output or config.norm_residual,
        "an embedding of its own": weights.embedding is not target.embedding,
        "the target's head, or its embedding as head": weights.head is target.head or config.llama.tie_word_embeddings,
        "attention or an MLP of another kind": type(attention) is not SelfAttention or type(mlp) is not GatedMLP,
    }
    if found := [what for what, is_so in odd.items() if is_so]:
        raise ConfigError(FLAG, f"{config.llama.origin}: a head with {found[0]} cannot be trained")
    for name, (part, _) in _places(weights).items():
        linear = isinstance(part, DenseLinear)
        if not (linear and part.bias is None or isinstance(part, Tensor)):
            raise ConfigError(FLAG, f"{config.llama.origin}: {name} is in few bits or has a bias: it cannot be trained")
    return weights


def _places(weights: Eagle3Weights) -> dict[str, tuple[Any, slice]]:
    """Where each tensor of the checkpoint is: a linear, or a norm's weight; and which of its rows."""
    layer, inputs = weights.layers[0], weights.inputs
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, SelfAttention) and isinstance(mlp, GatedMLP)
    shape = attention.shape
    queries, keys = (heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads))
    inner = mlp.down.in_features
    norms = inputs.token_norm, inputs.feature_norm, layer.mlp_norm, weights.norm
    token, feature, post, last = (norm.weight if isinstance(norm, RMSNorm) else norm for norm in norms)
    return {
        "fc.weight": (weights.fusion.fc, EVERYTHING),
        f"{LAYER}.self_attn.q_proj.weight": (attention.qkv, slice(0, queries)),
        f"{LAYER}.self_attn.k_proj.weight": (attention.qkv, slice(queries, queries + keys)),
        f"{LAYER}.self_attn.v_proj.weight": (attention.qkv, slice(queries + keys, None)),
        f"{LAYER}.self_attn.o_proj.weight": (attention.output, EVERYTHING),
        f"{LAYER}.mlp.gate_proj.weight": (mlp.gate_up, slice(0, inner)),
        f"{LAYER}.mlp.up_proj.weight": (mlp.gate_up, slice(inner, None)),
        f"{LAYER}.mlp.down_proj.weight": (mlp.down, EVERYTHING),
        f"{LAYER}.input_layernorm.weight": (token, EVERYTHING),
        f"{LAYER}.hidden_norm.weight": (feature, EVERYTHING),
        f"{LAYER}.post_attention_layernorm.weight": (post, EVERYTHING),
        "norm.weight": (last, EVERYTHING),
        "lm_head.weight": (weights.head, EVERYTHING),
    }


class LiveHead:
    """The tensors that serve, by the names of the checkpoint."""

    def __init__(self, weights: Eagle3Weights) -> None:
        self._places = _places(weights)

    def tensors(self) -> Tensors:
        """Views; of a weight in another layout than rows, copies."""
        found: Tensors = {}
        for name, (part, rows) in self._places.items():
            whole = part.matrix() if isinstance(part, DenseLinear) else part
            found[name] = whole[rows]
        return found

    @torch.inference_mode()
    def write(self, tensors: Tensors) -> None:
        """Write other values to the same addresses, rounded to the head's type. Sync: never on CUDA."""
        for name, (part, rows) in self._places.items():
            if isinstance(part, Tensor) or part.stored.layout is torch.strided:
                whole = part if isinstance(part, Tensor) else part.stored
                whole[rows].copy_(tensors[name])
                continue
            matrix = part.matrix()
            matrix[rows].copy_(tensors[name])
            part.stored.copy_(torch.ops.mkldnn._reorder_linear_weight(matrix, FEW_ROWS))


class Sample(NamedTuple):
    """A segment's rows from `offset` on are those of `tokens`; the answer's are from `start` on."""

    tokens: Sequence[int]
    start: int
    offset: int

    @property
    def begin(self) -> int:
        """The first token whose hidden state before it is known: those of prompts' last layers are not kept."""
        return self.start + 1


@dataclass(frozen=True)
class Laid:
    """Samples side by side, on the host."""

    rows: Tensor  # [B, L] i64, of the ring
    batch: Batch  # its tokens, lengths and starts; hidden states are none
    places: Tensor  # [n] i64, of B * L: rows whose guess is learnt


def laid_out(samples: Sequence[tuple[int, Sample]], is_known: Tensor) -> Laid:
    """Put samples together, each with the first row of its segment. Shapes: is_known [V] bool.

    Behind its end a sample's last row is repeated, because rows of others may hold NaN.
    """
    length = -(-max(len(sample.tokens) for _, sample in samples) // ROUNDED) * ROUNDED
    tokens, rows = torch.zeros(len(samples), length, dtype=torch.int64), torch.empty(len(samples), length).long()
    for place, (first, sample) in enumerate(samples):
        count = len(sample.tokens)
        tokens[place, :count] = torch.tensor(sample.tokens)
        rows[place] = first + sample.offset + torch.arange(length).clamp(max=count - 2)
    none = torch.empty(0)
    lengths, begins = ([len(each.tokens) for _, each in samples], [each.begin for _, each in samples])
    batch = Batch(tokens, none, none, torch.tensor(lengths), torch.tensor(begins))
    wanted = batch.answered(ahead=2) & is_known[batch.ahead(2)]
    return Laid(rows, batch, wanted.flatten().nonzero().squeeze(1))


class Learner:
    """Trains the copy, judges it, and swaps weights. `num_guesses`: of a window, at most."""

    def __init__(self, weights: Eagle3Weights, target: LoadedTarget, num_positions: int, num_guesses: int) -> None:
        frozen = Frozen.of(target, weights.config.llama, {}, num_positions)
        self.live = LiveHead(weights)
        begun = {name: tensor.clone() for name, tensor in self.live.tensors().items()}
        self.copy = Eagle3(frozen, weights.config.aux_layers, weights.target_ids, begun=begun)
        self._before = begun
        self._most = min(num_guesses, STEPS)
        self._rate = RATE * min(1.0, (WIDE / target.hidden_size) ** 0.5)
        parameters = list(self.copy.tensors.values())
        self._optimiser = torch.optim.AdamW(
            parameters, lr=self._rate, betas=BETAS, weight_decay=DECAY, fused=parameters[0].is_cuda
        )
        self.num_steps = 0  # since the copy was begun
        self.is_known = torch.zeros(target.vocab_size, dtype=torch.bool)
        self.is_known[weights.target_ids.cpu()] = True

    def step(self, batch: Batch, places: Tensor) -> None:
        """Take one step. Shapes: places [n] i64. Sync: never on CUDA."""
        with torch.inference_mode(False), torch.enable_grad():
            self.num_steps += 1
            for group in self._optimiser.param_groups:
                group["lr"] = self._rate * min(1.0, self.num_steps / WARM_UP)
            self.copy.loss_at(batch, places).backward()
            _clip([tensor.grad for tensor in self.copy.tensors.values() if tensor.grad is not None])
            self._optimiser.step()
            self._optimiser.zero_grad(set_to_none=True)

    @torch.no_grad()
    def judge(self, batch: Batch, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Guesses accepted after each root by the live head and by the copy; whether the copy's numbers are finite.

        Shapes: -> [B, L] i64, [B, L] i64, [] bool. Sync: never on CUDA.
        """
        live = copy.copy(self.copy)
        live.tensors = self.live.tensors()
        dtype = batch.aux.dtype
        finite = [tensor.to(dtype).isfinite().all() for tensor in self.copy.tensors.values()]
        finite.append(self.copy.loss_at(batch, places).isfinite())
        of_live, of_copy = (head.accepted(batch).clamp(max=self._most) for head in (live, self.copy))
        return of_live, of_copy, torch.stack(finite).all()

    def take_over(self) -> None:
        """The copy's numbers serve; those before are kept."""
        with torch.no_grad():
            for name, tensor in self.live.tensors().items():
                self._before[name].copy_(tensor)
        self.live.write(self.copy.tensors)

    def go_back(self) -> None:
        """What served before the last take-over serves again."""
        self.live.write(self._before)
        self.start_again()

    @torch.no_grad()
    def start_again(self) -> None:
        """The copy becomes what serves, with nothing learnt."""
        for name, tensor in self.live.tensors().items():
            self.copy.tensors[name].copy_(tensor)
        self._optimiser.state.clear()
        self.num_steps = 0


def _clip(gradients: Sequence[Tensor]) -> None:
    """Bound their norm; gradients that are not finite become 0. Sync: never."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
    scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    for each in gradients:
        each.mul_(scale).masked_fill_(~norm.isfinite(), 0.0)


def training_bytes(weights: Eagle3Weights, rows: int, segment_rows: int) -> int:
    """What the copy takes of a device's memory, and a step on so many rows.

    For each parameter 16 bytes, one copy in the head's type, and two more while a step runs; of each row in each
    unrolled step what its gradient needs: activations, logits in float32, and probabilities of keys.
    """
    llama, size = weights.config.llama, weights.embedding.dtype.itemsize
    count = weights.num_bytes // size
    row = (12 * llama.hidden_size + 5 * llama.intermediate_size) * size
    row += len(weights.target_ids) * (3 * 4 + size)
    row += llama.num_heads * (segment_rows + STEPS) * (2 * 4 + 2 * size)
    of_target = len(weights.target_ids) * weights.config.target_hidden_size * size
    return count * (16 + 3 * size) + rows * STEPS * row + of_target


def batches(chosen: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """So many at a time."""
    for begin in range(0, len(chosen), size):
        yield chosen[begin : begin + size]
