"""EAGLE drafting, written out for one request: the oracle for draft tokens and accept lengths.

The target is transformers' model; the head is its checkpoint's tensors and nothing of this project.
Row rule: the draft row at position p takes (the target's final hidden state of p, token of p + 1) and predicts the
token of p + 2. There is no norm before the first layer, and none after the last.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from eagle3_reference import Step
from torch import Tensor


@dataclass
class ReferenceHead:
    """The tensors of an EAGLE checkpoint, the target's embedding and head, and the K/V of the rows so far.

    `target_ids`: the tokens that may be guessed (FR-Spec); None: all.
    """

    t: dict[str, Tensor]
    config: dict
    embed: Tensor
    lm_head: Tensor
    target_ids: list[int] | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    def rope(self, x: Tensor, start: int) -> Tensor:
        d = x.shape[-1]
        inverse = self.config["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
        angles = torch.arange(start, start + x.shape[1], dtype=torch.float32)[:, None] * inverse
        cos, sin = torch.cat([angles.cos()] * 2, -1).to(x), torch.cat([angles.sin()] * 2, -1).to(x)
        return x * cos + torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1) * sin

    def heads(self, x: Tensor, name: str) -> Tensor:
        weight = self.t[f"layers.0.self_attn.{name}.weight"]
        return (x @ weight.T).view(len(x), -1, self.config["head_dim"]).transpose(0, 1)

    def forward(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Rows at positions start.. -> outputs. K/V from `start` on is replaced."""
        x = torch.cat((self.embed[tokens], features), -1) @ self.t["fc.weight"].T + self.t["fc.bias"]
        q, k = self.rope(self.heads(x, "q_proj"), start), self.rope(self.heads(x, "k_proj"), start)
        v = self.heads(x, "v_proj")
        if self.keys is not None:
            k, v = torch.cat((self.keys[:, :start], k), 1), torch.cat((self.values[:, :start], v), 1)
        self.keys, self.values = k, v
        group = q.shape[0] // k.shape[0]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(start)
        attended = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), attn_mask=mask
        )
        x = x + attended.transpose(0, 1).reshape(len(tokens), -1) @ self.t["layers.0.self_attn.o_proj.weight"].T
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        y = y * self.t["layers.0.post_attention_layernorm.weight"]
        gate, up = (y @ self.t[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.t["layers.0.mlp.down_proj.weight"].T

    def guess(self, output: Tensor) -> int:
        if self.target_ids is None:
            return int((output @ self.lm_head.T).argmax())
        return self.target_ids[int((output @ self.lm_head[self.target_ids].T).argmax())]


def generate(target, head: ReferenceHead, prompt: list[int], num_guesses: int, num_tokens: int):
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out."""
    from transformers import DynamicCache

    cache = DynamicCache()

    def forward(tokens: list[int], start: int) -> tuple[list[int], Tensor]:
        """The target's choices, and its hidden states after the final norm."""
        cache.crop(start)
        out = target(torch.tensor([tokens]), past_key_values=cache, output_hidden_states=True, use_cache=True)
        return out.logits[0].argmax(-1).tolist(), out.hidden_states[-1][0]

    def draft(output: Tensor, length: int) -> list[int]:
        guesses = [head.guess(output)]
        for i in range(num_guesses - 1):
            output = head.forward(guesses[-1:], output[None], length + i)[0]
            guesses.append(head.guess(output))
        return guesses

    with torch.no_grad():
        drawn, hidden = forward(prompt, 0)
        root, length, count = drawn[-1], len(prompt), 1
        guesses = draft(head.forward([*prompt[1:], root], hidden, 0)[-1], length)
        first, steps = root, []
        while count < num_tokens:
            drawn, hidden = forward([root, *guesses], length)
            accepted = next((i for i, g in enumerate(guesses) if g != drawn[i]), num_guesses)
            committed = drawn[: accepted + 1]
            steps.append(Step(guesses, accepted, committed))
            rows = head.forward(committed, hidden[: accepted + 1], length)
            length, root, count = length + accepted + 1, committed[-1], count + accepted + 1
            guesses = draft(rows[-1], length)
    return first, steps
