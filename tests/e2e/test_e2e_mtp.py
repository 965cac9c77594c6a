"""A target that drafts for itself, through real processes, from flags to tokens: those of plain decoding."""

import asyncio
from pathlib import Path

import pytest
from support.tiny.models import tiny_target, write_checkpoint
from support.tiny.mtp import in_deepseek_layout, tiny_mimo_v2, tiny_step, with_layers, with_mtp
from support.tiny.tokenizer import write_tokenizer

from overlap_spec import Engine, EngineConfig, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
NUMBERS = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


TARGET = tiny_target(7)
CHECKPOINTS = {
    "MiMo": with_mtp(8, TARGET),
    "DeepSeek": in_deepseek_layout(with_mtp(8, TARGET)),
    "MiMo-V2": with_layers(tiny_mimo_v2(8, TARGET, 3), TARGET),
    "Step-3.5": with_layers(tiny_step(8, TARGET, 3), TARGET),
}


@pytest.mark.full  # integration/test_mtp_checkpoint.py drafts by layers, test_e2e_eagle.py by a draft's files
@pytest.mark.parametrize("layout", CHECKPOINTS)
def test_tokens_are_those_of_plain_decoding(layout: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CHECKPOINTS[layout])
    write_tokenizer(tmp_path)

    async def tokens(**flags: object) -> list[int]:
        config = {"model_path": str(tmp_path), "dtype": "float64", "max_total_tokens": 2000, "log_level": "error"}
        async with Engine(EngineConfig(**config | flags)) as engine:
            answer = await engine.client.complete("The sky is", SAMPLING)
            assert "speculative_algorithm" not in flags or 0 < answer.usage.spec_verify_ct < 23
            return list(answer.token_ids)

    several = CHECKPOINTS[layout].config["num_nextn_predict_layers"] > 1
    drafted = tokens(speculative_algorithm="EAGLE", enable_multi_layer_eagle=several, **NUMBERS)
    assert asyncio.run(drafted) == asyncio.run(tokens())
