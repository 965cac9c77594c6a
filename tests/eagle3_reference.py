"""EAGLE-3 drafting, written out for one request: the oracle for draft tokens and accept lengths.

The target is transformers' model; the head is its checkpoint's tensors and nothing of this project.
Row rule: the draft row at position p takes (taps of p, token of p + 1) and predicts the token of p + 2.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class ReferenceHead:
    """The tensors of an EAGLE-3 checkpoint, and the K/V of the rows so far."""

    t: dict[str, Tensor]
    config: dict
    embed: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.t[name + ".weight"]

    def rope(self, x: Tensor, start: int) -> Tensor:
        d = x.shape[-1]
        inverse = self.config["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
        angles = torch.arange(start, start + x.shape[1], dtype=torch.float32)[:, None] * inverse
        cos, sin = torch.cat([angles.cos()] * 2, -1).to(x), torch.cat([angles.sin()] * 2, -1).to(x)
        return x * cos + torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1) * sin

    def heads(self, u: Tensor, name: str) -> Tensor:
        return (
            (u @ self.t[f"midlayer.self_attn.{name}.weight"].T)
            .view(len(u), -1, self.config["head_dim"])
            .transpose(0, 1)
        )

    def forward(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Rows at positions start.. -> residual sums before the final norm. K/V from `start` on is replaced."""
        u = torch.cat(
            (self.norm(self.embed[tokens], "midlayer.input_layernorm"), self.norm(features, "midlayer.hidden_norm")), -1
        )
        q, k = self.rope(self.heads(u, "q_proj"), start), self.rope(self.heads(u, "k_proj"), start)
        v = self.heads(u, "v_proj")
        if self.keys is not None:
            k, v = torch.cat((self.keys[:, :start], k), 1), torch.cat((self.values[:, :start], v), 1)
        self.keys, self.values = k, v
        group = q.shape[0] // k.shape[0]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(start)
        attended = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), attn_mask=mask
        )
        x = features + attended.transpose(0, 1).reshape(len(tokens), -1) @ self.t["midlayer.self_attn.o_proj.weight"].T
        y = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up = (y @ self.t[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.t["midlayer.mlp.down_proj.weight"].T

    def guess(self, output: Tensor) -> int:
        index = int((self.norm(output, "norm") @ self.t["lm_head.weight"].T).argmax())
        return index + int(self.t["d2t"][index])


@dataclass
class Step:
    """One verify step: the guesses, how many stood, and what was committed (bonus included)."""

    guesses: list[int]
    accept_len: int
    committed: list[int]


def generate(target, head: ReferenceHead, taps: list[int], prompt: list[int], num_guesses: int, num_tokens: int):
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out."""
    from transformers import DynamicCache

    cache = DynamicCache()

    def forward(tokens: list[int], start: int) -> tuple[list[int], Tensor]:
        cache.crop(start)
        out = target(torch.tensor([tokens]), past_key_values=cache, output_hidden_states=True, use_cache=True)
        return out.logits[0].argmax(-1).tolist(), torch.cat([out.hidden_states[i + 1][0] for i in taps], -1)

    def draft(output: Tensor, length: int) -> list[int]:
        guesses = [head.guess(output)]
        for i in range(num_guesses - 1):
            output = head.forward(guesses[-1:], output[None], length + i)[0]
            guesses.append(head.guess(output))
        return guesses

    with torch.no_grad():
        drawn, aux = forward(prompt, 0)
        root, length, count = drawn[-1], len(prompt), 1
        features = aux @ head.t["fc.weight"].T
        guesses = draft(head.forward([*prompt[1:], root], features, 0)[-1], length)
        first, steps = root, []
        while count < num_tokens:
            drawn, aux = forward([root, *guesses], length)
            accepted = next((i for i, g in enumerate(guesses) if g != drawn[i]), num_guesses)
            committed = drawn[: accepted + 1]
            steps.append(Step(guesses, accepted, committed))
            rows = head.forward(committed, (aux @ head.t["fc.weight"].T)[: accepted + 1], length)
            length, root, count = length + accepted + 1, committed[-1], count + accepted + 1
            guesses = draft(rows[-1], length)
    return first, steps
