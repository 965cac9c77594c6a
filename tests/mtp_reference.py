"""MTP drafting, written out for one request: the oracle for draft tokens and accept lengths.

The target is transformers' model; the layer is its checkpoint's tensors and nothing of this project.
Row rule: the draft row at position p takes (target's hidden state of p after the final norm, token of p + 1) and
predicts the token of p + 2; a draft step takes the layer's own output after its final norm.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from eagle3_reference import Step
from torch import Tensor


@dataclass(frozen=True)
class Mimo:
    """What MiMo calls the parts of the layer, in the order of the map's halves."""

    prefix: str = "model.mtp_layers.0."
    token_norm: str = "token_layernorm"
    hidden_norm: str = "hidden_layernorm"
    input_map: str = "input_proj"
    final_norm: str = "final_layernorm"
    mask_first: bool = True  # no embedding at position 0

    def halves(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, embedded


@dataclass(frozen=True)
class DeepSeek(Mimo):
    """The same of DeepSeek's, for a target of two layers."""

    prefix: str = "model.layers.2."
    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    input_map: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    mask_first: bool = False

    def halves(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return embedded, hidden


@dataclass
class ReferenceMtp:
    """The tensors of an MTP layer under the names of the checkpoint, and the K/V of the rows so far."""

    t: dict[str, Tensor]
    config: dict
    embed: Tensor
    head: Tensor
    layout: Mimo = Mimo()
    keys: Tensor | None = None
    values: Tensor | None = None

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.t[f"{self.layout.prefix}{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.t[f"{self.layout.prefix}{name}.weight"], self.t.get(f"{self.layout.prefix}{name}.bias"))

    def rope(self, x: Tensor, start: int) -> Tensor:
        d = x.shape[-1]
        inverse = 1.0 / self.config["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
        angles = torch.arange(start, start + x.shape[1], dtype=torch.float32)[:, None] * inverse
        cos, sin = torch.cat([angles.cos()] * 2, -1).to(x), torch.cat([angles.sin()] * 2, -1).to(x)
        return x * cos + torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1) * sin

    def heads(self, u: Tensor, name: str) -> Tensor:
        return self.linear(u, f"self_attn.{name}_proj").view(len(u), -1, self.config["head_dim"]).transpose(0, 1)

    def attend(self, u: Tensor, start: int) -> Tensor:
        """K/V from `start` on is replaced."""
        q, k, v = self.rope(self.heads(u, "q"), start), self.rope(self.heads(u, "k"), start), self.heads(u, "v")
        if self.keys is not None and self.values is not None:
            k, v = torch.cat((self.keys[:, :start], k), 1), torch.cat((self.values[:, :start], v), 1)
        self.keys, self.values = k, v
        group = q.shape[0] // k.shape[0]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(start)
        attended = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), attn_mask=mask
        )
        return self.linear(attended.transpose(0, 1).reshape(len(u), -1), "self_attn.o_proj")

    def forward(self, tokens: list[int], hidden: Tensor, start: int) -> Tensor:
        """Rows at positions start.. -> [rows, H], after the final norm."""
        embedded = self.embed[tokens]
        if start == 0 and self.layout.mask_first:
            embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
        embedded, hidden = self.norm(embedded, self.layout.token_norm), self.norm(hidden, self.layout.hidden_norm)
        x = self.linear(torch.cat(self.layout.halves(embedded, hidden), -1), self.layout.input_map)
        x = x + self.attend(self.norm(x, "input_layernorm"), start)
        y = self.norm(x, "post_attention_layernorm")
        x = x + self.linear(F.silu(self.linear(y, "mlp.gate_proj")) * self.linear(y, "mlp.up_proj"), "mlp.down_proj")
        return self.norm(x, self.layout.final_norm)

    def guess(self, output: Tensor) -> int:
        return int((self.head @ output).argmax())


def generate(target, mtp: ReferenceMtp, prompt: list[int], num_guesses: int, num_tokens: int) -> tuple[int, list[Step]]:
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out."""
    from transformers import DynamicCache

    cache = DynamicCache()

    def forward(tokens: list[int], start: int) -> tuple[list[int], Tensor]:
        cache.crop(start)
        hidden = target.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).last_hidden_state[0]
        return (hidden @ target.get_output_embeddings().weight.T).argmax(-1).tolist(), hidden

    def draft(output: Tensor, length: int) -> list[int]:
        guesses = [mtp.guess(output)]
        for i in range(num_guesses - 1):
            output = mtp.forward(guesses[-1:], output[None], length + i)[0]
            guesses.append(mtp.guess(output))
        return guesses

    with torch.no_grad():
        drawn, hidden = forward(prompt, 0)
        root, length, count = drawn[-1], len(prompt), 1
        guesses = draft(mtp.forward([*prompt[1:], root], hidden, 0)[-1], length)
        first, steps = root, []
        while count < num_tokens:
            drawn, hidden = forward([root, *guesses], length)
            accepted = next((i for i, guess in enumerate(guesses) if guess != drawn[i]), num_guesses)
            committed = drawn[: accepted + 1]
            steps.append(Step(guesses, accepted, committed))
            rows = mtp.forward(committed, hidden[: accepted + 1], length)
            length, root, count = length + accepted + 1, committed[-1], count + accepted + 1
            guesses = draft(rows[-1], length)
    return first, steps
