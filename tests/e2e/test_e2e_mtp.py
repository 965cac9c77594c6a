"""A target that drafts for itself, through real processes, from flags to tokens: those of plain decoding."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import TinyCheckpoint, tiny_target, write_checkpoint
from tiny_mtp import in_deepseek_layout, with_mtp
from tiny_tokenizer import write_tokenizer

from overlap_spec import Engine, EngineConfig, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
NUMBERS = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


@pytest.mark.parametrize("layout", [lambda mimo: mimo, in_deepseek_layout], ids=["MiMo", "DeepSeek"])
def test_tokens_are_those_of_plain_decoding(layout: Callable[[TinyCheckpoint], TinyCheckpoint], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layout(with_mtp(8, tiny_target(7))))
    write_tokenizer(tmp_path)

    async def tokens(**flags: object) -> list[int]:
        config = {"model_path": str(tmp_path), "dtype": "float64", "max_total_tokens": 2000, "log_level": "error"}
        async with Engine(EngineConfig(**config | flags)) as engine:
            answer = await engine.client.complete("The sky is", SAMPLING)
            assert "speculative_algorithm" not in flags or 0 < answer.usage.spec_verify_ct < 23
            return list(answer.token_ids)

    assert asyncio.run(tokens(speculative_algorithm="EAGLE", **NUMBERS)) == asyncio.run(tokens())
