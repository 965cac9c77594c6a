"""Gemma 4's assistant in an engine: its guesses are the loop's, and tokens are plain decoding's."""

from pathlib import Path

import pytest
import torch
from support.random_schedules import run_seeds
from support.reference.assistant import ReferenceAssistant, generate
from support.ring import RingConfig
from support.solo import Solo
from support.tiny.assistant import tiny_assistant
from support.tiny.families import TINY_FAMILIES
from support.tiny.methods import ASSISTANT
from support.tiny.models import tiny_target, write_checkpoint
from support.transformers_model import keep_float64, reference_model
from test_ring_families import answers_of, plain_answers
from test_smollm2 import chain_of, check_chain

from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.hub import resolve_model

NUM_TOKENS = 20
PROMPTS = [list(range(7, 29)), [90, 3, 17], [64]]
UNTIED = {"tie_word_embeddings": False, "final_logit_softcapping": None}


@pytest.mark.parametrize(
    ("family", "centroids"), [("gemma 4 e", 16), pytest.param("gemma 4 moe", 0, marks=pytest.mark.full)]
)
def test_it_drafts_as_the_written_out_loop(
    family: str, centroids: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses and accept lengths, step by step, through files as they are published."""
    keep_float64(monkeypatch)
    target = tiny_target(7, **TINY_FAMILIES[family] | UNTIED)
    draft = tiny_assistant(8, target, centroids=centroids)
    loop = ReferenceAssistant(draft.tensors, draft.config, reference_model(target, torch.float64))
    chains = []
    for prompt in PROMPTS:
        first, steps = generate(loop, prompt, 3, NUM_TOKENS)
        chains.append({"first": first, "steps": [vars(step) for step in steps]})
    write_checkpoint(tmp_path / "target", target)
    write_checkpoint(tmp_path / "draft", draft)
    files = resolve_model(EngineConfig(model_path=str(tmp_path / "target"), skip_tokenizer_init=True))
    solo = chain_of(files, 3, "NEXTN", dtype="float64", speculative_draft_model_path=str(tmp_path / "draft"))
    try:
        lengths = check_chain(solo, [{"prompt_ids": prompt} for prompt in PROMPTS], chains, NUM_TOKENS)
    finally:
        solo.close()
    assert len(set(lengths)) > 2, "guesses are accepted, and rejected"


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("gemma 4 e", marks=pytest.mark.full), "gemma 4 moe"])
def test_it_answers_as_plain_decoding(family: str, codec: TextCodec) -> None:
    plain = plain_answers(family, codec)
    drafted, steps = answers_of(RingConfig(method=ASSISTANT, family=family), codec)
    assert drafted == plain and steps < len(plain) * 23, "no guess was accepted"


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma 4", "gemma 4 e", "gemma 4 moe"])
def test_a_schedule(family: str, codec: TextCodec) -> None:
    seen = run_seeds(range(4, 5), codec, {"method": ASSISTANT, "family": family})
    assert seen["finished"] > 5 and seen["accepted"] > 0, dict(seen)


def test_trees_are_refused_by_name(tmp_path: Path) -> None:
    target = tiny_target(7, **TINY_FAMILIES["gemma 4"])
    write_checkpoint(tmp_path / "target", target)
    write_checkpoint(tmp_path / "draft", tiny_assistant(8, target))
    files = resolve_model(EngineConfig(model_path=str(tmp_path / "target"), skip_tokenizer_init=True))
    with pytest.raises(ConfigError, match=r"speculative-eagle-topk: an assistant guesses chains, got 2; use 1"):
        Solo(
            files,
            device="cpu",
            dtype="float64",
            speculative_algorithm="NEXTN",
            speculative_draft_model_path=str(tmp_path / "draft"),
            speculative_num_steps=3,
            speculative_eagle_topk=2,
            speculative_num_draft_tokens=4,
        )
