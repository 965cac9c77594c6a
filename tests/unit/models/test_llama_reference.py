"""Logits of every architecture against transformers, prefilled in chunks and decoded through scattered pages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.drawn import TOKENS, loaded, logits_of
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import TinyCheckpoint, load_tiny_target, tiny_config, tiny_target
from support.transformers_model import keep_float64, model_of, reference_model
from torch import Tensor

from overlap_spec.models.interfaces import TargetOutput
from overlap_spec.models.targets.decoder import DecoderTarget

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "no groups": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama 3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "yarn rope": {"rope_scaling": YARN},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3 with biases": TINY_FAMILIES["qwen3"] | {"attention_bias": True},
    "qwen3 with another eps": TINY_FAMILIES["qwen3"] | {"rms_norm_eps": 0.1, "tie_word_embeddings": False},
    "qwen2 with yarn": TINY_FAMILIES["qwen2"] | {"rope_scaling": YARN, "rope_theta": 1e6},
    "a window of one key": TINY_FAMILIES["mistral"] | {"sliding_window": 1},
    "windows by layer": TINY_FAMILIES["qwen3"]
    | {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma 3 with stretched rope": TINY_FAMILIES["gemma 3"] | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma 3 with windows by layer": TINY_FAMILIES["gemma 3"]
    | {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    },
    "gemma 3 untied": TINY_FAMILIES["gemma 3"] | {"tie_word_embeddings": False},
    "olmo 2 with yarn": TINY_FAMILIES["olmo 2"] | {"rope_scaling": YARN, "tie_word_embeddings": True},
    "phi 3 with groups and a quarter rotated": TINY_FAMILIES["phi 3"]
    | {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    "qwen3 moe, every second layer, weights as they are": TINY_FAMILIES["qwen3 moe"]
    | {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [], "tie_word_embeddings": True},
    "qwen3 moe with a window and one expert": TINY_FAMILIES["qwen3 moe"]
    | {"use_sliding_window": True, "sliding_window": 5, "num_experts_per_tok": 1, "mlp_only_layers": None},
    "mixtral with a window and all experts": TINY_FAMILIES["mixtral"]
    | {"sliding_window": 7, "num_experts_per_tok": 4, "rope_theta": 1e6},
    "deepseek v3 without a latent of queries or groups": TINY_FAMILIES["deepseek v3"]
    | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_scaling": None},
    "deepseek v3 with halves, another eps and no dense layer": TINY_FAMILIES["deepseek v3"]
    | {"rope_interleave": False, "rms_norm_eps": 0.1, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    "gpt oss without biases of attention, rope as it is": TINY_FAMILIES["gpt oss"]
    | {"attention_bias": False, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gpt oss with full layers first": TINY_FAMILIES["gpt oss"]
    | {"layer_types": ["full_attention", "sliding_attention"], "num_experts_per_tok": 6, "tie_word_embeddings": True},
    "deepseek v2 with groups and a latent of queries": TINY_FAMILIES["deepseek v2 lite"]
    | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 28}
    | {"routed_scaling_factor": 16.0, "first_k_dense_replace": 0},
    "glm 4.7 flash with layers by name": TINY_FAMILIES["glm 4.7 flash"]
    | {"mlp_layer_types": ["sparse", "sparse"]}
    | {"first_k_dense_replace": 0},
    "glm 4.5 with a quarter rotated, no norms of heads, no groups": TINY_FAMILIES["glm 4.5"]
    | {"use_qk_norm": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_key_value_heads": 1}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "glm 4.5 with another eps, no biases and no dense layer": TINY_FAMILIES["glm 4.5"]
    | {"attention_bias": False, "rms_norm_eps": 0.1, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    "glm 4.5 without a part of heads by name": {
        key: value for key, value in TINY_FAMILIES["glm 4.5"].items() if key != "partial_rotary_factor"
    },
    "mimo v2 flash with biases, groups and one size of heads": TINY_FAMILIES["mimo v2 flash"]
    | {"attention_bias": True, "v_head_dim": 24, "swa_v_head_dim": 24}
    | {"attention_value_scale": None, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}
    | {"routed_scaling_factor": 2.5, "tie_word_embeddings": True},
    "step 3.5 with one expert, its weight as it is, and positions as they are": TINY_FAMILIES["step 3.5"]
    | {"moe_top_k": 1, "moe_router_scaling_factor": 1.0, "rope_scaling": None},
    # Granite 4 is narrowed to float32 by transformers, and its experts have other names: `test_granite_hybrid.py`
    **{name: changes for name, changes in TINY_FAMILIES.items() if name not in ("llama", "granite 4", "granite 4 moe")},
}
LENGTHS = (33, 5)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def attached(checkpoint: TinyCheckpoint, dtype: torch.dtype, paged: Paged) -> DecoderTarget:
    weights = load_tiny_target(checkpoint, dtype)
    cache = paged.cache(weights.kv_shape, dtype)
    return weights.attach(cache, num_positions=512, aux_layers=(0, 1))


def run(model: DecoderTarget, paged: Paged, tokens: list[Tensor], counts: list[int]) -> list[TargetOutput]:
    """Feed the next `counts[b]` tokens of each request in one forward; split the output by request."""
    parts = [row[start : start + count] for row, start, count in zip(tokens, paged.lengths, counts, strict=True)]
    output = model.forward(torch.cat(parts), paged.rows(counts))
    split = zip(output.hidden.split(counts), output.aux.split(counts), strict=True)
    return [TargetOutput(hidden, aux) for hidden, aux in split]


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(13)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_aux_hidden_states_equal_transformers(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_float64(monkeypatch)
    checkpoint = tiny_target(3, context=1.0, **CASES[case])
    tokens = [torch.randint(128, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    paged = Paged(num_requests=2)
    model = attached(checkpoint, dtype, paged)
    steps = [[7, 1], [20, 3], *[[1, 0]] * 4, [2, 1]]  # chunks, then decode rows; request 1 sometimes has none
    outputs = [run(model, paged, tokens, counts) for counts in steps]
    assert paged.lengths == list(LENGTHS)

    reference = reference_model(checkpoint, dtype)
    for request, row in enumerate(tokens):
        hidden = torch.cat([output[request].hidden for output in outputs])
        aux = torch.cat([output[request].aux for output in outputs])
        with torch.no_grad():
            expected = reference(row[None], output_hidden_states=True)
            aux_hidden = torch.cat([stream_after(reference, row, layer) for layer in (0, 1)], dim=1)
        torch.testing.assert_close(model.logits(hidden).compute(), expected.logits[0], atol=TOLERANCE[dtype], rtol=0)
        torch.testing.assert_close(aux, aux_hidden, atol=TOLERANCE[dtype], rtol=0)


def stream_after(reference: Any, tokens: Tensor, layer: int) -> Tensor:
    """The residual stream that a layer puts out, before the final norm."""
    seen: list[Tensor] = []
    handle = reference.model.layers[layer].register_forward_hook(lambda module, inputs, output: seen.append(output))
    reference(tokens[None])
    handle.remove()
    return seen[0][0]


IN_EVERY_RUN = ("qwen3.5", "qwen3.5 moe")  # whose text models have a name of their own when they are saved alone
SAVED = [family for family in TINY_FAMILIES if family != "step 3.5"]  # of which transformers has the whole model alone


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in IN_EVERY_RUN else pytest.mark.slow) for each in SAVED]
)
def test_a_checkpoint_that_transformers_has_saved(family: str, tmp_path: Path) -> None:
    """Under its names for tensors, architectures and keys, not the published ones."""
    settings = {key: value for key, value in tiny_config(**TINY_FAMILIES[family]).items() if key != "architectures"}
    model = model_of(settings, torch.float32)
    random = torch.Generator().manual_seed(1)
    for each in (*model.parameters(), *(buffer for name, buffer in model.named_buffers() if "correction" in name)):
        each.data.normal_(std=0.2, generator=random)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(tmp_path)), expected, atol=1e-4, rtol=0)


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    tokens = [torch.arange(5, 5 + n) for n in (9, 9, 9)]
    paged, alone = Paged(num_requests=3), Paged(num_requests=1)
    checkpoint = tiny_target(4, context=1.0)
    together = run(attached(checkpoint, torch.float64, paged), paged, tokens, [9, 9, 9])
    single = run(attached(checkpoint, torch.float64, alone), alone, tokens[1:2], [9])
    torch.testing.assert_close(together[1].hidden, single[0].hidden, atol=1e-12, rtol=0)


def test_written_rows_can_be_written_again() -> None:
    """Rejected rows leave garbage behind their successors, which is overwritten before it is read."""
    tokens = torch.tensor([3, 4, 5, 6, 7, 8])
    paged = Paged(num_requests=1)
    model = attached(tiny_target(5, context=1.0), torch.float64, paged)
    model.forward(tokens[:3], paged.rows([3]))
    model.forward(torch.tensor([99, 98, 97]), paged.rows([3], commit=False))
    again = model.forward(tokens[3:], paged.rows([3]))
    fresh = Paged(num_requests=1)
    expected = attached(tiny_target(5, context=1.0), torch.float64, fresh).forward(tokens, fresh.rows([6]))
    torch.testing.assert_close(again.hidden, expected.hidden[3:], atol=1e-12, rtol=0)


def test_bfloat16_logits_are_widened() -> None:
    paged = Paged(num_requests=1)
    model = attached(tiny_target(6), torch.bfloat16, paged)
    output = model.forward(torch.tensor([3, 4]), paged.rows([2]))
    assert output.hidden.dtype == torch.bfloat16
    assert model.logits(output.hidden).compute().dtype == torch.float32
