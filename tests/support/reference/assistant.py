"""Gemma 4's assistant, written out for one request, on a target of transformers whose keys and values it reads.

How it is fed, its layers, centroids and projections are those of transformers 5.17,
models/gemma4_assistant/modeling_gemma4_assistant.py and models/gemma4/modeling_gemma4.py. That a query stands at the
position of the last token that the target has read, and sees what stands there and before, is sglang's
python/sglang/srt/speculative/frozen_kv_mtp_utils.py, commit 077454f4271e2794cfcba35149f0903810413761.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support.reference.layers import rms_norm
from support.reference.loop import Step, num_accepted


class ReferenceAssistant:
    """Its tensors, and the target's model."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], model: Any) -> None:
        self.t, self.config, self.text, self.model = tensors, config, config["text_config"], model
        self.eps = self.text["rms_norm_eps"]

    def read(self, tokens: list[int]) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The target's logits and final hidden states, and keys and values by kind of layer, each [nkv, T, d]."""
        out = self.model.model(torch.tensor([tokens]), return_shared_kv_states=True, use_cache=False)
        hidden = out.last_hidden_state[0]
        logits = self.model.lm_head(hidden)
        kept = {kind: (k[0], v[0]) for kind, (k, v) in out.shared_kv_states.items()}
        return logits, hidden, kept

    def draft(self, tokens: list[int], root: int, hidden: Tensor, kept: Any, num_guesses: int) -> list[Tensor]:
        """The logits of each guess after `tokens` and `root`. Shapes: hidden [H], of the last of `tokens`."""
        position, token, logits = len(tokens) - 1, root, []
        for _ in range(num_guesses):
            embedded = self.model.model.embed_tokens(torch.tensor(token))
            x = self.t["pre_projection.weight"] @ torch.cat((embedded, hidden))
            for index, kind in enumerate(self.text["layer_types"]):
                x = self.layer(x, f"model.layers.{index}", kind, position, *kept[kind])
            x = rms_norm(x[None], self.t["model.norm.weight"], self.eps)[0]
            logits.append(self.head(x))
            token, hidden = int(logits[-1].argmax()), self.t["post_projection.weight"] @ x
        return logits

    def layer(self, x: Tensor, name: str, kind: str, position: int, keys: Tensor, values: Tensor) -> Tensor:
        def norm(y: Tensor, part: str) -> Tensor:
            return rms_norm(y[None], self.t[f"{name}.{part}.weight"], self.eps)[0]

        heads = self.text["num_attention_heads"]
        q = (self.t[f"{name}.self_attn.q_proj.weight"] @ norm(x, "input_layernorm")).view(heads, -1)
        q = self.rotated(rms_norm(q, self.t[f"{name}.self_attn.q_norm.weight"], self.eps), kind, position)
        first = max(position - self.text["sliding_window"] + 1, 0) if kind == "sliding_attention" else 0
        keys, values = keys[:, first : position + 1], values[:, first : position + 1]
        found = []
        for index, query in enumerate(q):
            group = index * len(keys) // heads
            found.append((keys[group] @ query).softmax(0) @ values[group])
        attended = self.t[f"{name}.self_attn.o_proj.weight"] @ torch.cat(found)
        x = x + norm(attended, "post_attention_layernorm")
        y = norm(x, "pre_feedforward_layernorm")
        gate, up, down = (self.t[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + norm(down @ (F.gelu(gate @ y, approximate="tanh") * (up @ y)), "post_feedforward_layernorm")
        return x * self.t[f"{name}.layer_scalar"]

    def rotated(self, q: Tensor, kind: str, position: int) -> Tensor:
        """Shapes: [n, d] -> the same."""
        parameters, half = self.text["rope_parameters"][kind], q.shape[1] // 2
        pairs = torch.arange(half, dtype=torch.float32)
        inverse = 1.0 / parameters["rope_theta"] ** (2 * pairs / q.shape[1])
        inverse[int(half * parameters.get("partial_rotary_factor", 1.0)) :] = 0
        cos, sin = ((position * inverse).cos().to(q), (position * inverse).sin().to(q))
        first, second = q[:, :half], q[:, half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)

    def head(self, x: Tensor) -> Tensor:
        logits = self.t["model.embed_tokens.weight"] @ x
        if not self.config["use_ordered_embeddings"]:
            return logits
        best = (self.t["masked_embedding.centroids.weight"] @ x).topk(self.config["centroid_intermediate_top_k"])
        chosen = self.t["masked_embedding.token_ordering"].view(self.config["num_centroids"], -1)[best.indices]
        found = torch.full_like(logits, float(logits[chosen.flatten()].min()) - 1)
        found[chosen.flatten()] = logits[chosen.flatten()]
        return found


def generate(
    assistant: ReferenceAssistant, prompt: list[int], num_guesses: int, num_tokens: int
) -> tuple[int, list[Step]]:
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out."""
    with torch.no_grad():
        logits, hidden, kept = assistant.read(prompt)
        tokens, root, count, steps = list(prompt), int(logits[-1].argmax()), 1, list[Step]()
        first, last = root, hidden[-1]
        while count < num_tokens:
            drafted = assistant.draft(tokens, root, last, kept, num_guesses)
            guesses = [int(each.argmax()) for each in drafted]
            logits, hidden, kept = assistant.read([*tokens, root, *guesses])
            drawn = logits[len(tokens) :].argmax(1).tolist()
            accepted = num_accepted(guesses, drawn)
            committed = drawn[: accepted + 1]
            steps.append(Step(guesses, accepted, committed))
            tokens += [root, *guesses[:accepted]]
            root, last, count = committed[-1], hidden[len(tokens) - 1], count + accepted + 1
    return first, steps
