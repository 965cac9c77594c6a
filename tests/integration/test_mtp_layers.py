"""MTP layers, one for each guess: guesses and runs are those of tests/support/reference/mtp_layers.py, step by step.

On tiny random checkpoints in float64, with transformers' Llama and Qwen2 as the loop's targets.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference.mimo_v2_mtp import ReferenceMimoV2Layers
from support.reference.mtp_layers import Layers, MimoV2, ReferenceLayers, StepChain, generate
from support.reference.step_mtp import ReferenceStepLayers
from support.solo import Solo
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import TinyCheckpoint, tiny_target, write_checkpoint
from support.tiny.mtp import tiny_mimo_v2, tiny_step, with_layers
from support.transformers_model import keep_float64, reference_model
from test_mtp_checkpoint import norm_in_own_dtype
from test_smollm2 import chain_of, check_chain
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams

NUM_TOKENS = 28
PROMPTS = [list(range(7, 29)), [90, 3, 17], [64]]
LAYOUTS: dict[str, tuple[Layers, Any]] = {"MiMo-V2": (MimoV2(), tiny_mimo_v2), "Step-3.5": (StepChain(), tiny_step)}


def checkpoint_of(layout: str, family: str = "llama", num_layers: int = 3) -> TinyCheckpoint:
    target = tiny_target(7, **TINY_FAMILIES[family])
    return with_layers(LAYOUTS[layout][1](8, target, num_layers), target)


def files_of(directory: Path, checkpoint: TinyCheckpoint) -> ModelFiles:
    write_checkpoint(directory, checkpoint)
    return resolve_model(EngineConfig(model_path=str(directory), skip_tokenizer_init=True))


def transformers_model(checkpoint: TinyCheckpoint) -> Any:
    is_llama = checkpoint.config["model_type"] == "llama"
    kind, model_kind = (LlamaConfig, LlamaForCausalLM) if is_llama else (Qwen2Config, Qwen2ForCausalLM)
    config = kind(**{key: value for key, value in checkpoint.config.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    model = model_kind(config).to(torch.float64).eval()
    assert not model.load_state_dict(checkpoint.tensors, strict=False).missing_keys
    return model


def layered(files: ModelFiles, num_steps: int, **more: Any) -> Solo:
    return chain_of(files, num_steps, "EAGLE", dtype="float64", enable_multi_layer_eagle=True, **more)


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_own_dtype)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "num_steps"), [("llama", 1), ("llama", 2), ("llama", 3), ("qwen2", 3), ("qwen2 with windows", 3)]
)
def test_layers_draft_as_the_written_out_loop(layout: str, family: str, num_steps: int, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(layout, family)
    target = transformers_model(checkpoint)
    windowed = "windows" in family and layout == "MiMo-V2"
    layers = ReferenceLayers(
        LAYOUTS[layout][0],
        checkpoint.tensors,
        checkpoint.config,
        checkpoint.config["sliding_window"] if windowed else None,
    )
    chains, rows = [], []
    for prompt in PROMPTS:
        first, steps = generate(target, layers, prompt, num_steps, NUM_TOKENS)
        chains.append({"first": first, "steps": [vars(step) for step in steps]})
        rows.append({"prompt_ids": prompt})
    solo = layered(files_of(tmp_path, checkpoint), num_steps)
    try:
        lengths = check_chain(solo, rows, chains, NUM_TOKENS)
    finally:
        solo.close()
    assert len(set(lengths)) > (2 if num_steps > 1 else 1), "guesses stand, and fall"


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_tokens_are_those_of_plain_decoding(layout: str, tmp_path: Path) -> None:
    files = files_of(tmp_path, checkpoint_of(layout))
    sampling = SamplingParams(max_new_tokens=30, temperature=0.8, seed=5, ignore_eos=True)
    solos = layered(files, 3, depth=2, page_size=1), Solo(files, device="cpu", dtype="float64")
    drafted, plain = (solo.answer(PROMPTS[0], sampling) for solo in solos)
    for solo in solos:
        solo.close()
    assert drafted.tokens == plain.tokens and len(drafted.runs) < len(plain.runs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawn_guesses_of_layers_are_judged_by_rejection(layout: str, tmp_path: Path) -> None:
    """Greedy requests get plain decoding's tokens; sampled ones some, of which guesses stand."""
    files = files_of(tmp_path, checkpoint_of(layout))
    drawn = layered(files, 3, speculative_use_rejection_sampling=True)
    plain = Solo(files, device="cpu", dtype="float64")
    greedy = SamplingParams(max_new_tokens=30, temperature=0.0, seed=5, ignore_eos=True)
    assert drawn.answer(PROMPTS[0], greedy).tokens == plain.answer(PROMPTS[0], greedy).tokens
    sampled = SamplingParams(max_new_tokens=30, temperature=0.8, seed=5, ignore_eos=True)
    assert len(drawn.answer(PROMPTS[0], sampled).runs) < 29
    for solo in (drawn, plain):
        solo.close()


def test_without_the_flag_its_name_is_said(tmp_path: Path) -> None:
    files = files_of(tmp_path, checkpoint_of("MiMo-V2"))
    with pytest.raises(ConfigError, match="3 MTP layers, one for each guess: add --enable-multi-layer-eagle"):
        chain_of(files, 3, "EAGLE")
    elsewhere = files_of(tmp_path / "plain", tiny_target(7))
    with pytest.raises(CheckpointError, match="several MTP layers, one for each guess: --enable-multi-layer-eagle"):
        chain_of(elsewhere, 3, "NEXTN", speculative_draft_model_path=str(tmp_path), dtype="float64")


def test_a_draft_path_may_name_the_layers_and_must_have_enough(tmp_path: Path) -> None:
    layers = str(write_checkpoint(tmp_path / "layers", checkpoint_of("Step-3.5", num_layers=2)))
    plain = files_of(tmp_path / "plain", tiny_target(7))
    layered(plain, 2, speculative_draft_model_path=layers).close()
    with pytest.raises(ConfigError, match="--speculative-num-steps: .* has 2 MTP layers.*give at most 2, not 3"):
        layered(plain, 3, speculative_draft_model_path=layers)


def test_dummy_layers_have_the_shape_of_the_checkpoints(tmp_path: Path) -> None:
    solo = layered(files_of(tmp_path, checkpoint_of("MiMo-V2")), 3, load_format="dummy")
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0, seed=0, ignore_eos=True)
    assert len(solo.answer(PROMPTS[0], greedy).tokens) == 4
    solo.close()


OWN: dict[str, tuple[Any, Any]] = {
    "mimo v2 flash": (tiny_mimo_v2, ReferenceMimoV2Layers),
    "step 3.5": (tiny_step, ReferenceStepLayers),
}


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [3, 2])
@pytest.mark.parametrize("family", OWN)
def test_layers_of_their_own_target_draft_as_the_written_out_loop(
    family: str, num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's layers have windows and experts; the config of a MiMo-V2 does not say how many layers draft."""
    keep_float64(monkeypatch)
    make, reference = OWN[family]
    plain = tiny_target(7, **TINY_FAMILIES[family])
    checkpoint = with_layers(make(8, plain, 3), plain)
    if family == "mimo v2 flash":
        del checkpoint.config["num_nextn_predict_layers"]
    target = reference_model(plain, torch.float64)
    layers = reference(checkpoint.tensors, checkpoint.config)
    chains = []
    for prompt in PROMPTS:
        first, steps = generate(target, layers, prompt, num_steps, NUM_TOKENS)
        chains.append({"first": first, "steps": [vars(step) for step in steps]})
    with closing(layered(files_of(tmp_path, checkpoint), num_steps)) as solo:
        lengths = check_chain(solo, [{"prompt_ids": prompt} for prompt in PROMPTS], chains, NUM_TOKENS)
    assert len(set(lengths)) > 2, "guesses stand, and fall"
