"""A P-EAGLE head and its loop, written out in plain torch: the oracle for logits, guesses and accept lengths.

After the published implementations. The layers and the mask's features: github.com/sgl-project/SpecForge at commit
a6b6b0230009d15ec2a97a57384e6f53f0f96946, specforge/modeling/draft/peagle.py (`PEagleFirstLayer`, `PEagleStandardLayer`,
`mask_hidden` through `fc`). Which row sees which: github.com/vllm-project/speculators at commit
c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b, src/speculators/models/peagle/attention.py (`create_peagle_mask_mod`: a mask
row sees the committed rows, and the masks of its own chain up to itself). Nothing is cached: each step runs all rows,
and the masks after them, in one causal forward. Shapes: T rows of which the last K - 1 are masks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from support.reference.layers import Attention, gated_mlp, rms_norm
from support.reference.loop import CachedModel, Step, num_accepted


@dataclass(frozen=True)
class ReferencePEagle:
    """The tensors of a head, under SpecForge's names."""

    tensors: Mapping[str, Tensor]
    config: dict[str, Any]

    def logits(self, tokens: list[int], aux: Tensor, num_guesses: int) -> Tensor:
        """Of the guesses after the last row. Row p has the target's aux hidden states of p and the token of p + 1.

        Shapes: aux [T, n * H] -> [K, Vd].
        """
        t, num_masks = self.tensors, num_guesses - 1
        every = [*tokens, *[self.config["pard_token"]] * num_masks]
        hidden = torch.cat((aux, t["mask_hidden"].view(1, -1).expand(num_masks, -1))) @ t["fc.weight"].T
        embedded = rms_norm(t["embed_tokens.weight"][every], t["layers.0.input_layernorm.weight"], self._eps)
        normed = rms_norm(hidden, t["layers.0.hidden_norm.weight"], self._eps)
        residual = normed if self.config.get("norm_before_residual") else hidden
        x = self._layer("layers.0", torch.cat((embedded, normed), 1), residual)
        for index in range(1, self.config["num_hidden_layers"]):
            name = f"layers.{index}"
            x = self._layer(name, rms_norm(x, t[f"{name}.input_layernorm.weight"], self._eps), x)
        return rms_norm(x[-num_guesses:], t["norm.weight"], self._eps) @ t["lm_head.weight"].T

    def token(self, column: int) -> int:
        return column + int(self.tensors["d2t"][column])

    @property
    def _eps(self) -> float:
        eps: float = self.config["rms_norm_eps"]
        return eps

    def _layer(self, name: str, entering: Tensor, residual: Tensor) -> Tensor:
        """Shapes: entering [T, 2 H] or [T, H], residual [T, H] -> [T, H]."""
        t, attention = self.tensors, Attention(self.config["head_dim"], self.config["rope_theta"])
        q, k, v = (entering @ t[f"{name}.self_attn.{part}_proj.weight"].T for part in "qkv")
        x = residual + attention(q, k, v, 0) @ t[f"{name}.self_attn.o_proj.weight"].T
        y = rms_norm(x, t[f"{name}.post_attention_layernorm.weight"], self._eps)
        return x + gated_mlp(y, *(t[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))


@dataclass
class Loop:
    """What a greedy run did."""

    steps: list[Step] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # of each step's guesses: [K, Vd]


def generate(model: Any, head: ReferencePEagle, prompt: list[int], num_guesses: int, num_steps: int) -> Loop:
    """Greedy decoding of one request of a transformers model, `num_steps` verify steps."""
    target, loop = CachedModel(model), Loop()
    layers: list[int] = head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    with torch.no_grad():
        drawn, hidden = target.read(prompt, 0)
        tokens, aux = [*prompt, drawn[-1]], torch.cat([hidden[layer + 1] for layer in layers], 1)
        for _ in range(num_steps):
            logits, length = head.logits(tokens[1:], aux, num_guesses), len(tokens) - 1
            guesses = [head.token(int(row.argmax())) for row in logits]
            drawn, hidden = target.read([tokens[-1], *guesses], length)
            accepted = num_accepted(guesses, drawn)
            loop.steps.append(Step(guesses, accepted, drawn[: accepted + 1]))
            loop.logits.append(logits)
            read = torch.cat([hidden[layer + 1] for layer in layers], 1)
            tokens, aux = tokens + drawn[: accepted + 1], torch.cat((aux, read[: accepted + 1]))
    return loop
