"""A tiny checkpoint as a model of transformers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RMSNorm, DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm, DeepseekV3TopkRouter
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm, Glm4MoeTopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteRMSNorm, Glm4MoeLiteTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashRMSNorm, MiMoV2FlashTopkRouter
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm, Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextTopKRouter,
)
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7RMSNorm, Step3p7TextModel, Step3p7TopKRouter

from support.tiny.layouts import fused_experts
from support.tiny.models import TinyCheckpoint

NORMS = (
    MiMoV2FlashRMSNorm,
    *(LlamaRMSNorm, MistralRMSNorm, MixtralRMSNorm, Olmo2RMSNorm, Phi3RMSNorm, Qwen2RMSNorm, Qwen3RMSNorm),
    *(Qwen3MoeRMSNorm, DeepseekV3RMSNorm, DeepseekV2RMSNorm, Glm4MoeLiteRMSNorm, Glm4MoeRMSNorm, GptOssRMSNorm),
)

GATED_DELTA = {modeling_qwen3_next: "Qwen3Next", modeling_qwen3_5: "Qwen3_5", modeling_qwen3_5_moe: "Qwen3_5Moe"}
WITH_SINKS = ("gpt_oss", "mimo_v2_flash")


class StepForCausalLM(torch.nn.Module):
    """The text model of Step-3.7, which is Step-3.5's, with a head: transformers has it beside images alone."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, **more: Any) -> Any:
        found = self.model(tokens)
        return SimpleNamespace(logits=self.lm_head(found.last_hidden_state))

    def tie_weights(self) -> None:
        """Nothing is tied."""


def step_config(settings: dict[str, Any]) -> Any:
    """Without the layers that draft, which the lists go on for."""
    count, lists = settings["num_hidden_layers"], ("layer_types", "rope_theta", "partial_rotary_factors")
    cut = {key: settings[key][:count] for key in (*lists, "swiglu_limits", "swiglu_limits_shared")}
    kept = {key: value for key, value in settings.items() if key not in ("model_type", "num_nextn_predict_layers")}
    names = {"num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts"}
    named = {new: settings[old] for new, old in (names | {"num_experts_per_tok": "moe_top_k"}).items()}
    return Step3p7TextConfig(**kept | cut | named)


def model_of(settings: dict[str, Any], dtype: torch.dtype) -> Any:
    """Of a config.json without `architectures`; with random weights."""
    is_step = settings["model_type"] == "step3p5"
    config = step_config(settings) if is_step else AutoConfig.for_model(**settings)
    # It keeps float64, where "eager" narrows to float32; but not of models with sinks, which "sdpa" does not know.
    config._attn_implementation = "eager" if config.model_type in WITH_SINKS else "sdpa"
    config._experts_implementation = "eager"  # knows float64
    made = StepForCausalLM(config) if is_step else AutoModelForCausalLM.from_config(config)
    return made.to(dtype).eval()


def reference_model(checkpoint: TinyCheckpoint, dtype: torch.dtype) -> Any:
    """Its weights are the checkpoint's, all of them."""
    model = model_of({key: value for key, value in checkpoint.config.items() if key != "architectures"}, dtype)
    missing, unexpected = model.load_state_dict(fused_experts(checkpoint.tensors), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


def _norm_in_own_dtype(self: Any, x: Tensor) -> Tensor:
    """Transformers' norm narrows float64 to float32, which would hide all but seven digits."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _route_in_own_dtype(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Transformers' softmax over experts narrows to float32 too."""
    logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
    weights, experts = logits.softmax(-1).topk(self.top_k)
    if getattr(self, "norm_topk_prob", True):
        weights /= weights.sum(-1, keepdim=True)
    return logits, weights, experts


def _score_in_own_dtype(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of groups narrow to float32, too."""
    logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
    scores = logits.sigmoid()
    by_group = (scores + self.e_score_correction_bias).unflatten(1, (self.num_group, -1))
    best = by_group.topk(2).values.sum(-1).topk(self.topk_group).indices
    masked = torch.full_like(by_group, -torch.inf)
    index = best[:, :, None].expand(-1, -1, by_group.shape[2])
    experts = masked.scatter(1, index, by_group.gather(1, index)).flatten(1).topk(self.top_k).indices
    weights = scores.gather(1, experts)
    if self.norm_topk_prob:
        weights /= weights.sum(-1, keepdim=True) + 1e-20
    return logits, weights * self.routed_scaling_factor, experts


def _choose_in_own_dtype(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Step-3.5's sigmoid, too."""
    logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
    scores = logits.sigmoid()
    experts = (scores + self.e_score_correction_bias).topk(self.top_k).indices
    weights = scores.gather(1, experts)
    return logits, weights / weights.sum(-1, keepdim=True), experts


def _weigh_in_own_dtype(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax of groups, too."""
    logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
    found = logits.softmax(-1)
    if self.topk_method != "greedy":
        by_group = found.unflatten(1, (self.num_group, -1))
        best = by_group.amax(2).topk(self.topk_group).indices
        index = best[:, :, None].expand(-1, -1, by_group.shape[2])
        found = torch.zeros_like(by_group).scatter(1, index, by_group.gather(1, index)).flatten(1)
    weights, experts = found.topk(self.top_k)
    return logits, weights * self.routed_scaling_factor, experts


def _norm_gemma4_in_own_dtype(self: Any, x: Tensor) -> Tensor:
    normed = x * (x.pow(2).mean(-1, keepdim=True) + self.eps).pow(-0.5)
    return normed * self.weight if self.with_scale else normed


def _route_gemma4_in_own_dtype(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gemma 4's softmax, too."""
    found = self.proj(self.norm(x) * self.scale * self.scalar_root_size).softmax(-1)
    weights, experts = found.topk(self.config.top_k_experts)
    return found, weights / weights.sum(-1, keepdim=True) * self.per_expert_scale[experts], experts


def _rotate_in_own_dtype(q: Tensor, k: Tensor, frequencies: Tensor) -> list[Tensor]:
    """DeepSeek-V2's rotation by complex numbers."""
    pairs = (torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) for x in (q, k))
    return [torch.view_as_real(each * frequencies[:, None]).flatten(3) for each in pairs]


def _angles_as_elsewhere(self: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """`torch.polar` rounds cosines and sines in another way than `cos` and `sin`, which all other models take."""
    angles = position_ids[:, :, None].float() * self.inv_freq.float()
    return torch.complex(angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling)


def _gate_in_own_dtype(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """The norm of heads of Gated DeltaNet, too."""
    return _norm_in_own_dtype(self, x) * torch.nn.functional.silu(gate)


def _without_narrowing(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward in which `float` leaves float64 as it is."""
    narrow = Tensor.float

    def wide(*given: Any, **named: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else narrow(self))
            return forward(*given, **named)

    return wide


def _recur_in_own_dtype(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """Its recurrence, too: token by token from an empty state, as the paper has it (arXiv:2412.06464, equation 10)."""
    q, k = (x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    state, found = value.new_zeros(*value.shape[:1], *key.shape[2:], value.shape[3]), []
    for t in range(value.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (value[:, t] - known))
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * query.shape[3] ** -0.5)
    return torch.stack(found, dim=1), state


def keep_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the norms and routers of all families computed in the model's own type."""
    for router in (Qwen3MoeTopKRouter, MixtralTopKRouter, Qwen3NextTopKRouter, Qwen3_5MoeTopKRouter):
        monkeypatch.setattr(router, "forward", _route_in_own_dtype)
    for router in (DeepseekV3TopkRouter, Glm4MoeLiteTopkRouter, Glm4MoeTopkRouter, MiMoV2FlashTopkRouter):
        monkeypatch.setattr(router, "forward", _score_in_own_dtype)
    monkeypatch.setattr(modeling_deepseek_v2, "apply_rotary_emb", _rotate_in_own_dtype)
    monkeypatch.setattr(modeling_deepseek_v2.DeepseekV2RotaryEmbedding, "forward", _angles_as_elsewhere)
    monkeypatch.setattr(DeepseekV2TopkRouter, "forward", _weigh_in_own_dtype)
    for norm in NORMS:
        monkeypatch.setattr(norm, "forward", _norm_in_own_dtype)
    monkeypatch.setattr(Gemma4RMSNorm, "forward", _norm_gemma4_in_own_dtype)
    monkeypatch.setattr(Gemma4TextRouter, "forward", _route_gemma4_in_own_dtype)
    for norm in (Gemma3RMSNorm, Step3p7RMSNorm, Qwen3NextRMSNorm, Qwen3_5RMSNorm, Qwen3_5MoeRMSNorm):
        monkeypatch.setattr(norm, "forward", lambda self, x: self._norm(x) * (1 + self.weight))
    monkeypatch.setattr(Step3p7TopKRouter, "forward", _choose_in_own_dtype)
    for module, name in GATED_DELTA.items():
        layer = getattr(module, f"{name}GatedDeltaNet")
        monkeypatch.setattr(getattr(module, f"{name}RMSNormGated"), "forward", _gate_in_own_dtype)
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", _recur_in_own_dtype)
        monkeypatch.setattr(layer, "forward", _without_narrowing(layer.forward))
