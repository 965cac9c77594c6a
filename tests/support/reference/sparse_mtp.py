"""The MTP layer of models whose layers have experts, written out for one request: experts row by row.

The token's embedding comes first, then the target's hidden state after its final norm; the layer is an ordinary one of
the model, with experts; position 0 is not masked.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from support.reference.layers import gated_mlp
from support.reference.mtp import DeepSeek, ReferenceMtp


class ReferenceSparseMtp(ReferenceMtp):
    """See `ReferenceMtp`."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], embed: Tensor, head: Tensor) -> None:
        super().__init__(tensors, config, embed, head, DeepSeek())
        self.config = config

    @abstractmethod
    def attend(self, u: Tensor, start: int) -> Tensor:
        """Rows at positions start.. Shapes: [T, H] -> the same."""

    def stream(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Before the final norm."""
        embedded, hidden = self.norm(self.embed[tokens], "enorm"), self.norm(features, "hnorm")
        x = self.linear(torch.cat((embedded, hidden), -1), "eh_proj")
        x = x + self.attend(self.norm(x, "input_layernorm"), start)
        y = self.norm(x, "post_attention_layernorm")
        return x + torch.stack([self.experts(row) for row in y])

    def experts(self, row: Tensor) -> Tensor:
        """Shapes: [H] -> [H]."""
        config, probabilities = self.config, torch.sigmoid(self.weight("mlp.gate") @ row)
        rated = (probabilities + self.t[f"{self.layout.prefix}mlp.gate.e_score_correction_bias"]).tolist()
        size = len(rated) // config["n_group"]
        groups = [range(size * group, size * (group + 1)) for group in range(config["n_group"])]
        groups.sort(key=lambda group: -sum(sorted((rated[expert] for expert in group), reverse=True)[:2]))
        known = sorted(expert for group in groups[: config["topk_group"]] for expert in group)
        best = sorted(known, key=lambda expert: -rated[expert])[: config["num_experts_per_tok"]]
        total = sum(float(probabilities[expert]) for expert in best)
        found = self.mlp("mlp.shared_experts", row)
        for expert in best:
            factor = float(probabilities[expert]) / total * config["routed_scaling_factor"]
            found = found + factor * self.mlp(f"mlp.experts.{expert}", row)
        return found

    def mlp(self, name: str, row: Tensor) -> Tensor:
        return gated_mlp(row, *(self.weight(f"{name}.{part}_proj") for part in ("gate", "up", "down")))
