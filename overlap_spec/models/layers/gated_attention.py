"""Attention whose heads are gated, each by a number of its own that a row gives (Step-3.5)."""

from dataclasses import dataclass

from overlap_spec_kernels import Normed, normalised
from overlap_spec_kernels.experts.best_of_groups import sigmoid_of_rows
from torch import Tensor

from overlap_spec.models.layers.decoder import Attend, SelfAttention
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.work import ForwardWork, attention_work


@dataclass(frozen=True, slots=True)
class GatedAttention(SelfAttention):
    """What a head finds is multiplied by the sigmoid of its gate, before the second linear."""

    gate: AnyLinear  # [n, H]

    @property
    def work(self) -> ForwardWork:
        attended = attention_work(self.shape.num_heads, self.shape.head_dim)
        return self.qkv.work + self.gate.work + self.output.work + attended

    def _attended(self, x: Normed, attend: Attend) -> Tensor:
        """Shapes: [T, H] -> [R, n d]."""
        found = attend(self.qkv(x))
        gates = sigmoid_of_rows(self.gate(attend.kept(normalised(x))))
        return (found.view(len(found), self.shape.num_heads, -1) * gates[:, :, None]).flatten(1)
