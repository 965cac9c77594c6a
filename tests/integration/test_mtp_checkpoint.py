"""MTP layers found in their target's checkpoint: guesses and runs are those of support/reference/mtp.py, step by step.

On a tiny random checkpoint in float64, with transformers' Qwen2 as the loop's target; and in float32 on the default
target with a layer trained for it (`--heads DIR` with `mtp/`), where what the loop did is committed
(tests/data/mtp_chains.json). The default run takes 4 prompts x 32 tokens of these; `-m full` takes all 20 x 64.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference.glm_mtp import ReferenceGlmMtp
from support.reference.latent_mtp import ReferenceLatentMtp
from support.reference.mtp import DeepSeek, Mimo, ReferenceMtp, generate
from support.reference.qwen3_next_mtp import ReferenceQwen3NextMtp
from support.solo import assert_equal_up_to_near_ties
from support.tiny.families import HYBRIDS, TINY_FAMILIES
from support.tiny.models import TinyCheckpoint, tiny_target, write_checkpoint
from support.tiny.mtp import in_deepseek_layout, tiny_nextn, tiny_qwen3_next, with_mtp
from support.transformers_model import keep_float64, reference_model
from test_smollm2 import ALL_TOKENS, DATA, FEW_TOKENS, accept_figures, chain_of, check_chain, greedy
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.hub import resolve_model
from overlap_spec.speculative.proposers import autoregressive

FEW_PROMPTS = 4
PROMPTS = [list(range(7, 29)), [90, 3, 17], [64]]


def norm_in_own_dtype(self: Any, x: Tensor) -> Tensor:
    """Transformers' norm narrows float64 to float32."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def transformers_model(checkpoint: TinyCheckpoint) -> Any:
    config = Qwen2Config(**{key: value for key, value in checkpoint.config.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    model = Qwen2ForCausalLM(config).to(torch.float64).eval()
    assert not model.load_state_dict(checkpoint.tensors, strict=False).missing_keys
    return model


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(
    ("method", "num_steps", "layout"), [("EAGLE", 3, Mimo()), ("NEXTN", 5, Mimo()), ("EAGLE", 3, DeepSeek())]
)
def test_a_tiny_checkpoint_drafts_as_the_written_out_loop(
    method: str, num_steps: int, layout: Mimo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_own_dtype)
    checkpoint = with_mtp(8, tiny_target(7))
    checkpoint = in_deepseek_layout(checkpoint) if isinstance(layout, DeepSeek) else checkpoint
    write_checkpoint(tmp_path, checkpoint)
    files = resolve_model(EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True))
    target, tensors = transformers_model(checkpoint), checkpoint.tensors
    embed = tensors["model.embed_tokens.weight"]
    chains, rows = [], []
    for prompt in PROMPTS:
        mtp = ReferenceMtp(tensors, checkpoint.config, embed, tensors["lm_head.weight"], layout)
        first, steps = generate(target, mtp, prompt, num_steps, FEW_TOKENS)
        chains.append({"first": first, "steps": [vars(step) for step in steps]})
        rows.append({"prompt_ids": prompt})
    with closing(chain_of(files, num_steps, method, dtype="float64")) as solo:
        lengths = check_chain(solo, rows, chains, FEW_TOKENS)
    assert len(set(lengths)) > 2


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("few_rows", [autoregressive.FEW_ROWS, 0])
@pytest.mark.parametrize(
    ("family", "num_steps"),
    [("deepseek v3", 3), ("glm 4.7 flash", 5), ("glm 4.5", 3), ("qwen3 next", 3), ("qwen3.5", 3)],
)
def test_a_layer_of_experts_drafts_as_the_written_out_loop(
    family: str, num_steps: int, few_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`few_rows`: of wider windows the layer goes on with one row each."""
    monkeypatch.setattr(autoregressive, "FEW_ROWS", few_rows)
    keep_float64(monkeypatch)
    plain = tiny_target(7, **TINY_FAMILIES[family])
    made = tiny_qwen3_next if family in HYBRIDS else tiny_nextn
    checkpoint, target = made(8, plain), reference_model(plain, torch.float64)
    write_checkpoint(tmp_path, checkpoint)
    files = resolve_model(EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True))
    embed, head = (checkpoint.tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    kind = ReferenceLatentMtp if "kv_lora_rank" in plain.config else ReferenceGlmMtp
    kind = ReferenceQwen3NextMtp if family in HYBRIDS else kind
    chains = []
    for prompt in PROMPTS:
        loop = kind(checkpoint.tensors, checkpoint.config, embed, head)
        first, steps = generate(target, loop, prompt, num_steps, FEW_TOKENS)
        chains.append({"first": first, "steps": [vars(step) for step in steps]})
    with closing(chain_of(files, num_steps, "NEXTN", dtype="float64")) as solo:
        lengths = check_chain(solo, [{"prompt_ids": prompt} for prompt in PROMPTS], chains, FEW_TOKENS)
    assert len(set(lengths)) > 2


@pytest.fixture(scope="module")
def chains() -> dict[str, list[dict[str, Any]]]:
    return json.loads((DATA / "mtp_chains.json").read_text())["chains"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_steps", [3, 5])
def test_a_trained_layer_drafts_as_the_written_out_loop(
    merged: ModelFiles, rows: list[dict], chains: dict, num_steps: int
) -> None:
    with closing(chain_of(merged, num_steps, "EAGLE")) as solo:
        lengths = check_chain(solo, rows[:FEW_PROMPTS], chains[str(num_steps)][:FEW_PROMPTS], FEW_TOKENS)
    assert len(set(lengths)) > 2


def test_two_steps_in_flight_and_small_pages_change_nothing(merged: ModelFiles, rows: list[dict]) -> None:
    with closing(chain_of(merged, 3, "NEXTN", depth=2, page_size=1)) as solo:
        assert_equal_up_to_near_ties(rows[:2], lambda ids: solo.answer(ids, greedy(FEW_TOKENS)).tokens, FEW_TOKENS)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_steps", [3, 5])
def test_accept_length_is_the_written_out_loops(
    merged: ModelFiles, rows: list[dict], chains: dict, num_steps: int, record_summary
) -> None:
    with closing(chain_of(merged, num_steps, "EAGLE")) as solo:
        lengths = check_chain(solo, rows[:20], chains[str(num_steps)], ALL_TOKENS)
    record_summary(f"smollm2_mtp_chain{num_steps}_cpu", accept_figures(lengths))
