"""A language model as draft through real processes, from flags to tokens: those of plain decoding."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny.models import tiny_target, write_checkpoint
from support.tiny.standalone import tiny_language_draft
from support.tiny.tokenizer import write_tokenizer

from overlap_spec import Engine, SamplingParams
from overlap_spec.errors import ConfigError

EngineOf = Callable[[dict[str, object]], Engine]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("draft"), tiny_language_draft(2, tiny_target(1)))
    return write_tokenizer(directory)


def flags_of(draft: Path) -> dict[str, object]:
    return {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": 3,  # fixed: a tiny target is faster without guesses, and adaptive steps would find out
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }


@pytest.mark.full  # integration/test_ring_standalone.py has the tokens, test_e2e_eagle.py a draft's files
def test_tokens_are_those_of_plain_decoding(
    engine_of: EngineOf, draft: Path, seeded: tuple[SamplingParams, list[int]]
) -> None:
    sampling, wanted = seeded

    async def tokens() -> list[int]:
        async with engine_of(flags_of(draft)) as engine:
            assert not [note for note in engine.notes if "vocabulary" in note], "its tokenizer was compared"
            answer = await engine.client.complete("The sky is", sampling)
            assert answer.usage.spec_verify_ct < len(answer.token_ids) - 1, "no guess was right"
            return list(answer.token_ids)

    assert asyncio.run(tokens()) == wanted


@pytest.mark.full
def test_without_a_tokenizer_sizes_are_compared_and_the_log_says_so(engine_of: EngineOf, draft: Path) -> None:
    async def notes() -> list[str]:
        async with engine_of(flags_of(draft) | {"skip_tokenizer_init": True}) as engine:
            return engine.notes

    assert any("only the size of its vocabulary" in note for note in asyncio.run(notes()))


def test_another_vocabulary_ends_the_start_before_any_process(engine_of: EngineOf, tmp_path: Path) -> None:
    async def start() -> None:
        async with engine_of(flags_of(other)):
            pass

    other = write_tokenizer(write_checkpoint(tmp_path, tiny_language_draft(2, tiny_target(1), vocab=120)), 120)
    with pytest.raises(ConfigError, match="token 120 is missing there and 'w120' in the target's"):
        asyncio.run(start())
