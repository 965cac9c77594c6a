"""EAGLE with a token map through real processes, from flags to tokens: those of plain decoding."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny.eagle import tiny_eagle
from support.tiny.models import VOCAB, tiny_target, write_checkpoint

from overlap_spec import Engine, SamplingParams
from overlap_spec.errors import ActorDied

EngineOf = Callable[[dict[str, object]], Engine]


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Flags of a head for `tiny_model`, and of a map of three quarters of its tokens."""
    directory = write_checkpoint(tmp_path_factory.mktemp("eagle"), tiny_eagle(2, tiny_target(1)))
    torch.save(list(range(VOCAB - 1, VOCAB // 4, -1)), directory / "map.pt")
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(directory),
        "speculative_token_map": str(directory / "map.pt"),
        "speculative_num_steps": 3,  # fixed: a tiny target is faster without guesses, and adaptive steps would find out
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }


@pytest.mark.slow
def test_tokens_are_those_of_plain_decoding(
    engine_of: EngineOf, eagle: dict[str, object], seeded: tuple[SamplingParams, list[int]]
) -> None:
    sampling, wanted = seeded

    async def tokens() -> list[int]:
        async with engine_of(eagle) as engine:
            answer = await engine.client.complete("The sky is", sampling)
            assert 0 < answer.usage.spec_verify_ct < 23, "of 24 tokens one is the prompt's"
            return list(answer.token_ids)

    assert asyncio.run(tokens()) == wanted


@pytest.mark.full
def test_a_map_of_another_target_fails_the_start_by_its_file(
    engine_of: EngineOf, eagle: dict[str, object], tmp_path: Path
) -> None:
    async def start() -> None:
        async with engine_of(eagle | {"speculative_token_map": str(tmp_path / "map.pt")}):
            pass

    torch.save([1, VOCAB], tmp_path / "map.pt")
    with pytest.raises(ActorDied, match=rf"map\.pt: found token id {VOCAB}, expected 0 to {VOCAB - 1}"):
        asyncio.run(start())
