"""The requests of a benchmark: chats, and prompts as token ids for an engine without a tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.hub import resolve_model
from overlap_spec.messages import ChatPrompt, SamplingParams

PROMPTS = Path(__file__).parent.parent / "data" / "prompts"
RANDOM = "random"
PROMPT_LENGTH = 128  # tokens of a random prompt
WARM_UP_ROWS = 2000  # random prompts from here on are never measured


@dataclass(frozen=True)
class SamplingMode:
    """Parameters of sampling. Temperature 0 is greedy."""

    temperature: float
    top_p: float = 1.0

    @property
    def label(self) -> str:
        if self.temperature == 0:
            return "greedy"
        return f"T {self.temperature:g}" + (f", top_p {self.top_p:g}" if self.top_p < 1 else "")

    def params(self, num_tokens: int) -> SamplingParams:
        """The parameters of a request that ends by itself or after `num_tokens`."""
        return SamplingParams(max_new_tokens=num_tokens, temperature=self.temperature, top_p=self.top_p, seed=0)


def sampling_of(figures: Mapping[str, Any]) -> SamplingMode:
    """The sampling of a report's figures."""
    return SamplingMode(figures["temperature"], figures["top_p"])


GREEDY = SamplingMode(0.0)
SAMPLED = (SamplingMode(1.0), SamplingMode(0.7, 0.9))  # the API's default, and a common choice for chats


@dataclass(frozen=True)
class Workload:
    """The prompts and sizes of a benchmark. `prompts`: chat20, peer64, `random`, or a JSON file of strings."""

    prompts: str = "chat20"
    num_tokens: int = 256
    temperature: float = 0.0
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    chats: str | None = None  # in throughput runs, prompts that are also answered one by one to the end of turn
    sampled: tuple[SamplingMode, ...] = ()  # measured after every greedy measurement, in the same engine

    def texts(self) -> list[str]:
        """The chat prompts."""
        return load_prompts(self.prompts)

    def describe(self) -> dict[str, Any]:
        """The fields of a report."""
        return {name: getattr(self, name) for name in ("prompts", "num_tokens", "temperature")}


def load_prompts(name: str, field: str = "prompts") -> list[str]:
    """The prompts of that name or in that file. Raises: ConfigError naming the flag of `field`."""
    known = PROMPTS / f"{name}.json"
    path = known if known.is_file() else Path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[str])
    except (OSError, msgspec.DecodeError) as error:
        names = ", ".join(sorted(file.stem for file in PROMPTS.glob("*.json")))
        raise ConfigError(
            field, f"{name} is no set of prompts ({error}); use {names} or a JSON list of texts"
        ) from None


def random_prompts(count: int, vocab_size: int, first: int = 0) -> list[list[int]]:
    """Fixed pseudo-random token ids, different for each row, from row `first` on."""
    return [_random_prompt(row, vocab_size, PROMPT_LENGTH) for row in range(first, first + count)]


def warm_up_prompts(prompts: Sequence[list[int]], vocab_size: int) -> list[list[int]]:
    """Unmeasured prompts, as many and as long as `prompts`."""
    return [_random_prompt(WARM_UP_ROWS + row, vocab_size, len(prompt)) for row, prompt in enumerate(prompts)]


def _random_prompt(row: int, vocab_size: int, length: int) -> list[int]:
    return [(row * 7919 + i * 104729) % (vocab_size - 10) + 5 for i in range(length)]


def chat_prompts(config: EngineConfig, texts: list[str]) -> list[list[int]]:
    """Token ids of each text as the only message of a chat, in the model's template.

    Raises: ConfigError, CheckpointError if the model has no tokenizer.
    """
    from overlap_spec.frontend.codec import load_codec  # imports numpy, so only for texts

    tokenizer_dir = resolve_model(replace(config, skip_tokenizer_init=False)).tokenizer_dir
    assert tokenizer_dir is not None, "a tokenizer was asked for"
    codec = load_codec(Path(tokenizer_dir))
    rendered = [codec.render(ChatPrompt([{"role": "user", "content": text}])) for text in texts]
    return [codec.encode(text, add_special_tokens=False) for text in rendered]  # the template adds the special tokens


def batch_prompts(config: EngineConfig, workload: Workload, vocab_size: int) -> list[list[int]]:
    """Token ids for the largest batch; smaller batches take the first of them."""
    most = max(workload.batch_sizes)
    if workload.prompts == RANDOM:
        return random_prompts(most, vocab_size)
    texts = workload.texts()
    return chat_prompts(config, [texts[i % len(texts)] for i in range(most)])
