"""A tiny model on disk, and services that serve it."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command_line import Service
from support.tiny.models import tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer

from overlap_spec import Engine, EngineConfig, SamplingParams

CONTEXT = 8192  # long enough for a stream that outlives what a test does to it


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, and its EAGLE-3 head in `head/`."""
    directory = tmp_path_factory.mktemp("model")
    target = tiny_target(seed=1, max_position_embeddings=CONTEXT)
    write_checkpoint(directory, target)
    write_tokenizer(directory)
    write_checkpoint(directory / "head", tiny_eagle3(seed=2, target=target))
    return directory


@pytest.fixture(scope="session")
def tiny_flags(tiny_model: Path) -> tuple[str, ...]:
    """The tiny model, drafted for by its head, exact."""
    return (
        *("--model", str(tiny_model), "--dtype", "float64", "--max-total-tokens", "20000"),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model", str(tiny_model / "head")),
    )


@pytest.fixture(scope="session")
def engine_of(tiny_model: Path) -> Callable[[dict[str, object]], Engine]:
    """Not started. Of flags: an engine of the tiny model, exact."""
    given = {"model_path": str(tiny_model), "dtype": "float64", "max_total_tokens": 2000, "log_level": "error"}
    return lambda flags: Engine(EngineConfig(**given | flags))


@pytest.fixture(scope="session")
def seeded(engine_of: Callable[[dict[str, object]], Engine]) -> tuple[SamplingParams, list[int]]:
    """A sampled request, and the tokens that plain decoding answers to `The sky is`: of one engine, for all methods."""
    sampling = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, ignore_eos=True)

    async def plain() -> list[int]:
        async with engine_of({"speculative_algorithm": "NONE"}) as engine:
            return list((await engine.client.complete("The sky is", sampling)).token_ids)

    return sampling, asyncio.run(plain())


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_flags: tuple[str, ...]) -> Iterator[Service]:
    """One service for all tests that leave it as they found it, but for its counters."""
    own = tmp_path_factory.mktemp("service")
    with Service(own, *tiny_flags, "--served-model-name", "tiny", SGLANG_ENABLE_SPEC_V2="1") as running:
        yield running
