"""Trains an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840, 3.1: training-time test).

Row i has (features of place i, embedding of token i + 1), rotary place i, and guesses token i + 2. Features of the
first draft step are the target's aux hidden states through `fc`; of step j they are the head's own output of step j - 1
at row i - 1. So step j at row i is the j-th guess of the chain that began at row i - j:

    keys of step j at row i:   step 0, rows 0 .. i - j   |   steps 1 .. j of the same chain, rows i - j + 1 .. i

The loss is the cross-entropy with the target's distribution over the draft vocabulary, of steps whose weights fall.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from overlap_spec_kernels import attend_own_keys, attend_own_keys_back, soft_cross_entropy
from torch import Tensor

from overlap_spec.errors import ConfigError
from overlap_spec.models.drafts.eagle3 import LAYER, Eagle3Weights, tensor_places
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.decoder import SelfAttention
from overlap_spec.models.layers.linear import DenseLinear, rows_of
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.loading.loader import load_eagle3
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.train_draft.head import Batch, Frozen, Head, Tensors, Weights, guess_loss, rotated

STEPS = 7  # of the unrolled chain
DECAY = 0.8  # of the weight of a step, after each


class Eagle3(Head):
    """The head."""

    def __init__(self, frozen: Frozen, aux_layers: tuple[int, ...], ids: Tensor, begun: Tensors | int = 0) -> None:
        """`ids` [Vd] i64: the target tokens that it guesses among."""
        self.ids = ids.to(frozen.embedding.device)
        self._rows = frozen.target.head.rows(self.ids)  # of the target, for its distribution
        self._is_known = torch.zeros(frozen.target.vocab_size, dtype=torch.bool, device=self.ids.device)
        self._is_known[self.ids] = True
        super().__init__(frozen, aux_layers, begun)
        ids = ids.cpu()  # `d2t` is the distance from a draft id to its target id
        self.buffers = {"d2t": ids - torch.arange(len(ids)), "t2d": self._is_known.cpu()}
        self.kept = {"ids": ids}

    def _begun(self, random: torch.Generator) -> Tensors:
        """The target's last layer, which reads its own last aux hidden state; the head's rows of the vocabulary."""
        hidden = self._frozen.llama.hidden_size
        layer = self._frozen.begun_layer(self._frozen.layer(-1), 2 * hidden, random)
        made = {f"{LAYER}.{name}": tensor for name, tensor in layer.items()}
        made[f"{LAYER}.hidden_norm.weight"] = made[f"{LAYER}.input_layernorm.weight"]
        made[f"{LAYER}.input_layernorm.weight"] = torch.ones(hidden)
        made["fc.weight"] = self._frozen.fc(len(self._aux_layers), random)
        made["norm.weight"] = self._frozen.final_norm
        made["lm_head.weight"] = self._rows.matrix()
        return made

    def config(self) -> dict[str, Any]:
        """With the layers that are read, as SGLang and vLLM look for it."""
        layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(self._aux_layers)}
        return self._frozen.given | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "mlp_bias": False,
            "draft_vocab_size": len(self.ids),
            "target_hidden_size": self._frozen.target.hidden_size,
            "eagle_config": layers,
        }

    def places(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Rows whose guess can be learnt. Shapes: -> [n] i64, of B * L. Sync: reads their number."""
        wanted = batch.answered(ahead=2) & self._is_known[batch.ahead(2)]
        return wanted.flatten().nonzero().squeeze(1)

    def loss_at(self, batch: Batch, places: Tensor, count: Tensor) -> Tensor:
        at = places % batch.tokens.shape[1]
        at = at.where(torch.arange(len(at), device=at.device) < count, -1)
        probs = self._target_probs(batch.hidden.flatten(0, 1)[places + 1])
        steps = []
        for step, output, weights in self.unrolled(batch, STEPS):
            rows = weights.norm("norm", output.flatten(0, 1).index_select(0, places))
            counted = (at >= step).float()  # the chain has begun in this sample
            shares = DECAY**step * counted / counted.sum().clamp(min=1)
            measure = partial(measure_distributions, probs, shares)
            steps.append(guess_loss(rows, weights["lm_head"], weights["lm_head"], measure)[0])
        return torch.stack(steps).sum()

    @torch.no_grad()
    def _target_probs(self, hidden: Tensor) -> Tensor:
        """Of the draft vocabulary. Shapes: [R, H] -> [R, Vd] f32."""
        return torch.cat([self._rows.logits(part).float().softmax(-1) for part in hidden.split(4096)])

    @torch.no_grad()
    def accepted(self, batch: Batch) -> Tensor:
        counts, is_kept = torch.zeros_like(batch.tokens), torch.ones_like(batch.tokens, dtype=torch.bool)
        right = batch.ahead(2)
        for step, output, weights in self.unrolled(batch, STEPS):
            rows = weights.norm("norm", output).flatten(0, 1)
            guesses = self.ids[self.guesses(rows, weights["lm_head"])].view_as(right)
            is_right = (guesses == right) & batch.answered(ahead=2)
            is_kept &= F.pad(is_right[:, step:], (0, step), value=False)  # by the row where the chain began
            counts += is_kept
        return F.pad(counts[:, :-1], (1, 0))  # the chain of row i begins at the root i + 1

    def unrolled(self, batch: Batch, num_steps: int) -> Iterator[tuple[int, Tensor, Weights]]:
        """Each step, its residual sums [B, L, H], and the weights that computed them."""
        llama, embedded = self._frozen.llama, self._frozen.embedding(batch.ahead(1))
        weights, keys, values = self.weights(), list[Tensor](), list[Tensor]()
        of_tokens, of_features = torch.cat([weights[f"{LAYER}.self_attn.{part}_proj"] for part in "qkv"]).chunk(2, 1)
        # Tokens give all steps the same part of the sums.
        tokens = F.linear(weights.norm(f"{LAYER}.input_layernorm", embedded), of_tokens).flatten(0, 1)
        features, cos_sin = weights.linear("fc", batch.aux), self._frozen.cos_sin[: len(batch.places)]
        for step in range(num_steps):
            normed = weights.norm(f"{LAYER}.hidden_norm", features).flatten(0, 1)
            qkv = torch.addmm(tokens, normed, of_features.mT).view(*features.shape[:2], -1)
            q, k, v = rotated(qkv, cos_sin, llama.num_heads, llama.num_kv_heads)
            keys.append(k)
            values.append(v)
            between = features + weights.linear(f"{LAYER}.self_attn.o_proj", _attended(q, keys, values).flatten(2))
            output = between + weights.mlp(f"{LAYER}.mlp", weights.norm(f"{LAYER}.post_attention_layernorm", between))
            yield step, output, weights
            features = torch.cat((torch.zeros_like(output[:, :1]), output[:, :-1]), 1)  # of the row before


def measure_distributions(probs: Tensor, shares: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies with distributions (`guess_loss`). Shapes: probs and logits [R, Vd], shares [R] -> [], [R]."""
    losses = soft_cross_entropy(logits, probs, shares)
    return losses.sum(), losses


def _attended(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of the last step (`chain_attention_reference`)."""
    if len(keys) == 1 or (q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16)):
        return chain_attention_reference(q, keys, values)
    return chain_attention(q, *keys, *values)


def chain_attention_reference(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of the step after `len(keys) - 1` steps; rows whose chain began before the sample give 0.

    Shapes: q [B, L, h, d], each of keys and values [B, L, g, d] -> [B, L, h, d].
    """
    step, group = len(keys) - 1, q.shape[2] // keys[0].shape[2]
    length, q = q.shape[1] - step, q[:, step:].transpose(1, 2)
    keys, values = ([each.repeat_interleave(group, 2).transpose(1, 2) for each in part] for part in (keys, values))
    if not step:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True).transpose(1, 2)
    at = torch.arange(length, device=q.device)
    earlier = (q @ keys[0][:, :, :length].mT).masked_fill(at > at[:, None], -torch.inf)
    own = [(q * keys[m][:, :, m : m + length]).sum(-1, keepdim=True) for m in range(1, step + 1)]
    logits = torch.cat((earlier, *own), -1) * q.shape[3] ** -0.5
    probs = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    found = probs[..., :length] @ values[0][:, :, :length]
    for m in range(1, step + 1):
        found = found + probs[..., length + m - 1, None] * values[m][:, :, m : m + length]
    return F.pad(found, (0, 0, step, 0)).transpose(1, 2)


class _ChainAttention(torch.autograd.Function):
    """The same without a row of logits in memory: causal attention to the keys of step 0, and a chain's few keys.

    Both parts are merged by the logarithms of their sums. The gradients of the first part are those of PyTorch's kernel
    for the merged output and the merged logarithms, as in ring attention: it makes probabilities from the logarithms.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, *kept: Tensor) -> Tensor:
        step, group = len(kept) // 2 - 1, q.shape[2] // kept[0].shape[2]
        keys, values = torch.stack(kept[1 : step + 1]), torch.stack(kept[step + 2 :])
        before = q.shape[1] - step  # rows that chains at this step begin after
        first = [each[:, :before].repeat_interleave(group, 2) for each in (kept[0], kept[step + 1])]
        found, logs, *state = _causal(q[:, step:], *first)
        whole, sums = attend_own_keys(q, keys, values, found, logs)
        ctx.save_for_backward(q, whole, sums, keys, values, *first)
        ctx.flash_state = state
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, whole, sums, keys, values, *first = ctx.saved_tensors
        step, num_kv_heads = len(keys), keys.shape[3]
        k, v = first
        of_q, *of_first = _causal_backward(grad[:, step:], q[:, step:], k, v, whole[:, step:], sums, ctx.flash_state)
        of_q, of_keys, of_values = attend_own_keys_back(grad, q, keys, values, whole, sums, of_q)
        summed = [F.pad(each.unflatten(2, (num_kv_heads, -1)).sum(3), (0, 0, 0, 0, 0, step)) for each in of_first]
        return of_q, summed[0], *of_keys, summed[1], *of_values


chain_attention: Callable[..., Tensor] = _ChainAttention.apply


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Causal attention. Shapes: [B, n, h, d] -> [B, n, h, d], logarithms of sums [B, h, n], what the backward needs."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:8]
    return found[0].transpose(1, 2), *found[1:]


def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, state: Sequence[Any]
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v where `out` and `logs` are those of more keys than `k`."""
    given = *(each.transpose(1, 2) for each in (grad, q, k, v, out)), logs
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, True)
    else:
        *sizes, seed, offset = state
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, *sizes, 0.0, True, seed, offset)
    return tuple(each.transpose(1, 2) for each in found)


def read_head(source: DraftSource, target: LoadedTarget, flag: str) -> dict[str, Any]:
    """A head to begin with: the tokens that it guesses among, the layers that it reads, and its parameters.

    Raises: ConfigError as `check_learns`; CheckpointError naming a tensor that is missing or unknown.
    """
    weights = check_learns(load_eagle3(source, target), target, flag)
    tensors = {name: rows_of(*place) for name, place in tensor_places(weights).items()}
    return {"ids": weights.target_ids, "aux_layers": weights.config.aux_layers, "tensors": tensors}


def check_learns(weights: object, target: LoadedTarget, flag: str) -> Eagle3Weights:
    """Raises: ConfigError if this head is not what the trainer knows: one layer of matrices, as SpecForge trains it."""
    if not isinstance(weights, Eagle3Weights):
        raise ConfigError(flag, f"an EAGLE-3 head that guesses chains can learn, not a {type(weights).__name__}")
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
        "norms of heads, sinks or a window": config.llama.head_norms or config.llama.sinks or any(config.llama.windows),
    }
    found = [what for what, is_so in odd.items() if is_so]
    for name, (part, _) in {} if found else tensor_places(weights).items():
        if not isinstance(part, Tensor | DenseLinear) or getattr(part, "bias", None) is not None:
            found.append(f"{name} in few bits or with a bias")
    if found:
        raise ConfigError(flag, f"{config.llama.origin}: a head with {found[0]} cannot be trained")
    return weights
