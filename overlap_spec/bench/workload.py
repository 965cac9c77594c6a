"""What a benchmark sends: chats, and prompts as token ids for an engine without a tokenizer. Not here: sending."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from overlap_spec.config import EngineConfig
from overlap_spec.hub import resolve_model
from overlap_spec.messages import ChatPrompt
from overlap_spec.tokenizer.codec import TextCodec, load_codec

PROMPTS = Path(__file__).parent.parent / "data" / "prompts"
RANDOM = "random"
PROMPT_LENGTH = 128  # of random prompts


@dataclass(frozen=True)
class Workload:
    """What is sent. `prompts`: chat20, peer64, `random`, or a JSON file with a list of strings."""

    prompts: str = "chat20"
    num_tokens: int = 256
    temperature: float = 0.0
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    commit: str | None = None  # of the source tree, where git cannot say
    chats: str | None = None  # of throughput runs: prompts that are also answered one by one, to the end of turn

    def texts(self) -> list[str]:
        """The chat prompts."""
        return read_prompts(self.prompts)

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {name: getattr(self, name) for name in ("prompts", "num_tokens", "temperature")}


def read_prompts(name: str) -> list[str]:
    """The prompts of that name or in that file."""
    known = PROMPTS / f"{name}.json"
    texts: list[str] = json.loads((known if known.is_file() else Path(name)).read_text())
    return texts


def random_prompts(count: int, vocab_size: int, first: int = 0) -> list[list[int]]:
    """A fixed sequence of token ids for each row, different for each, from row `first` on."""
    rows = range(first, first + count)
    return [[(row * 7919 + i * 104729) % (vocab_size - 10) + 5 for i in range(PROMPT_LENGTH)] for row in rows]


def chat_prompts(config: EngineConfig, texts: list[str]) -> list[list[int]]:
    """Each text as the one message of a chat, in the model's template, as token ids.

    Raises: ConfigError, CheckpointError if the model brings no tokenizer.
    """
    tokenizer_dir = resolve_model(replace(config, skip_tokenizer_init=False)).tokenizer_dir
    assert tokenizer_dir is not None, "a tokenizer was asked for"
    codec = load_codec(Path(tokenizer_dir))
    return [_encode(codec, text) for text in texts]


def _encode(codec: TextCodec, text: str) -> list[int]:
    rendered = codec.render(ChatPrompt([{"role": "user", "content": text}]))
    return codec.encode(rendered, add_special_tokens=False)  # the template writes its own


def batch_prompts(config: EngineConfig, workload: Workload, vocab_size: int) -> list[list[int]]:
    """Token ids for the largest batch; smaller ones take the first of them."""
    most = max(workload.batch_sizes)
    if workload.prompts == RANDOM:
        return random_prompts(most, vocab_size)
    texts = workload.texts()
    return chat_prompts(config, [texts[i % len(texts)] for i in range(most)])
