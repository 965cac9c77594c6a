"""gpt-oss (arXiv:2508.10925): Llama's decoder; each head has a sink, and every second layer a window.

Router and experts have biases, and the product of gate and up is bounded. The experts of a layer are in one tensor,
with gate's and up's rows in turn: in mxfp4 as published, or transposed as transformers writes them.

    mlp.router.weight [E, H], .bias [E]
    mlp.experts.gate_up_proj_blocks [E, 2I, H / 32, 16], _scales [E, 2I, H / 32]; or gate_up_proj [E, H, 2I]
    mlp.experts.down_proj_blocks [E, H, I / 32, 16], _scales [E, H, I / 32]; or down_proj [E, I, H]
    mlp.experts.gate_up_proj_bias [E, 2I], down_proj_bias [E, H]
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from overlap_spec_kernels import Biases, Clamp
from overlap_spec_kernels.launch import capability_of
from torch import Tensor

from overlap_spec.models.layers.experts import (
    Experts,
    MixtureMLP,
    MostProbable,
    Router,
    SeparateExperts,
    StackedExperts,
)
from overlap_spec.models.layers.linear import AnyLinear, make_linear
from overlap_spec.models.layers.mlp import MLP, ClampedMLP
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.division import dividing, equal_part, sharing
from overlap_spec.models.loading.quantized import as_linear, as_stack, take_matrix, take_stored_experts
from overlap_spec.models.quantization.linear import StoredWeight
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.llama import LlamaConfig, load_llama
from overlap_spec.models.targets.mixture import (
    ExpertSizes,
    MixtureConfig,
    read_sizes,
    require_parts,
)
from overlap_spec.models.targets.reading import ConfigReader

CLAMP = Clamp(alpha=1.702, limit=7.0)
THETA = 150000.0  # where the config does not say, as are the next
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(config: Mapping[str, Any], origin: str) -> MixtureConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    reader.refuse_unless("swiglu_limit", CLAMP.limit)
    sizes = read_sizes(reader, "num_local_experts", "intermediate_size", normalised=True)
    filled = {**config, "rope_theta": config.get("rope_theta") or THETA}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        filled["rope_scaling"] = ROPE
    llama = LlamaConfig.from_hf(filled, origin)
    return MixtureConfig(llama, sizes, (True,) * llama.num_layers)


def load(config: MixtureConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""

    def load_mlp(llama: LlamaConfig, weights: Weights, index: int) -> MLP:
        return take_mlp(weights, f"layers.{index}.mlp", llama.hidden_size, config.experts, sharing(weights.division))

    return load_llama(config.decoder, checkpoint, load_mlp)


@dataclass(frozen=True)
class _Stored:
    """The experts of a layer in a checkpoint: gate's rows first, as everywhere else."""

    checkpoint: Weights
    name: str
    hidden: int
    sizes: ExpertSizes  # of this rank's columns
    rank: Rank

    @property
    def order(self) -> Tensor:
        """Gate's rows, then those of the up projection, which are stored in turn. Shapes: [2I]."""
        return torch.arange(2 * self.sizes.inner_size).view(-1, 2).t().flatten()

    def biases(self) -> Biases:
        """Those of all experts; the first rank adds the second product's."""
        count, inner = self.sizes.num_experts, self.sizes.inner_size
        gate_up = self.checkpoint.take(f"{self.name}.gate_up_proj_bias", (count, 2 * inner))
        down = self.checkpoint.take(f"{self.name}.down_proj_bias", (count, self.hidden))
        own = down if self.rank.rank == 0 else torch.zeros_like(down)
        return Biases(gate_up[:, self.order.to(gate_up.device)], own)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Shapes: [E, 2I, H], [E, H, I]."""
        count, inner = self.sizes.num_experts, self.sizes.inner_size
        gate_up = self.checkpoint.take(f"{self.name}.gate_up_proj", (count, self.hidden, 2 * inner))
        down = self.checkpoint.take(f"{self.name}.down_proj", (count, inner, self.hidden))
        gate_up = gate_up[:, :, self.order.to(gate_up.device)]
        return gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()

    def separate(self) -> list[ClampedMLP]:
        """A CPU's, in any form of linears."""
        biases = self.biases()
        if self.checkpoint.covers(self.name):
            gate_up, down = self._stored_linears(biases)
        else:
            gate_up, down = (list(map(make_linear, *pair)) for pair in zip(self.matrices(), biases, strict=True))
        return [ClampedMLP(*linears, CLAMP) for linears in zip(gate_up, down, strict=True)]

    def stacked(self) -> StackedExperts:
        """A GPU's. Where no kernel multiplies by a format, its weights become those of the model's type."""
        biases = self.biases()
        if not self.checkpoint.covers(self.name):
            return StackedExperts(*self.matrices(), biases, CLAMP)
        gate_up, down = self._stored()
        whole = as_stack(self.checkpoint, f"{self.name}.gate_up_proj", gate_up, 2)
        return StackedExperts(whole, as_stack(self.checkpoint, f"{self.name}.down_proj", down, 1), biases, CLAMP)

    def _stored(self) -> tuple[list[StoredWeight], list[StoredWeight]]:
        """Of gate and up, and of down, for each expert."""
        count, inner, order = self.sizes.num_experts, self.sizes.inner_size, self.order
        gate_up = take_stored_experts(self.checkpoint, f"{self.name}.gate_up_proj", (count, 2 * inner, self.hidden))
        down = take_stored_experts(self.checkpoint, f"{self.name}.down_proj", (count, self.hidden, inner))
        return [each.in_order(order.to(each.values.device)) for each in gate_up], down

    def _stored_linears(self, biases: Biases) -> tuple[list[AnyLinear], list[AnyLinear]]:
        """Of gate and up, and of down, for each expert."""
        names = f"{self.name}.gate_up_proj", f"{self.name}.down_proj"
        ordered, down = self._stored()

        def linears(name: str, weights: list[StoredWeight], of_part: Tensor) -> list[AnyLinear]:
            pairs = zip(weights, of_part, strict=True)
            return [as_linear(self.checkpoint, name, [weight], bias) for weight, bias in pairs]

        return linears(names[0], ordered, biases.gate_up), linears(names[1], down, biases.down)


def take_mlp(
    checkpoint: Weights,
    mlp: str,
    hidden: int,
    sizes: ExpertSizes,
    rank: Rank = WHOLE,
) -> MixtureMLP:
    """Router and experts of a layer. Of several ranks each takes the whole router, and its columns of every expert."""
    require_parts(checkpoint, f"{mlp}.experts", sizes, rank)
    weight = take_matrix(checkpoint, f"{mlp}.router", (sizes.num_experts, hidden))
    router_bias = checkpoint.take(f"{mlp}.router.bias", (sizes.num_experts,))
    inner = sizes.inner_size
    columns = equal_part(rank, 2 * inner, dim=2)  # gate's and up's in turn: both of a rank are neighbours
    bias = equal_part(rank, 2 * inner, dim=1)
    parts = {"gate_up_proj": columns, "gate_up_proj_bias": bias, "down_proj": equal_part(rank, inner, dim=1)}
    stored = _Stored(checkpoint, f"{mlp}.experts", hidden, replace(sizes, inner_size=inner // rank.ranks), rank)
    experts: Experts
    with dividing(checkpoint, rank, parts, of_experts=True):
        if capability_of(checkpoint.forms.device) is None:
            experts = SeparateExperts(tuple(stored.separate()))
        else:
            experts = stored.stacked()
    return MixtureMLP(
        Router(weight, MostProbable(sizes.top_k, sizes.normalised, router_bias)), experts, rank.communicator
    )
