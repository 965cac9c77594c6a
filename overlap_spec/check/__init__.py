"""What a model would run on, and what is refused, from configs and headers alone (`overlap-spec check`).

No list of refusals is here. The flags go through `resolve`, the files through the loaders on the device `meta`, which
has shapes and types but no values, the sizes through the worker's budget, and the tokenizer is loaded as it is served.

Here is what a check asks and has found: one struct for each part of the table. It imports no torch. A `Place` is the
device that a model is checked for: the one that is here, or a GPU that is told by its memory and capability.
"""

import re
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from overlap_spec.config import MIB, EngineConfig, Machine
from overlap_spec.errors import ConfigError
from overlap_spec.runtime import machine

CONTEXT_BYTES = 600 * MIB  # of a process with torch on an H200, beside weights: the driver's context and libraries
CAPABILITY = (9, 0)  # of an H100 or H200, where none is given
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
UNITS["TI"] = 1 << 40


@dataclass(frozen=True)
class Asked:
    """A GPU as the command line describes it; it need not be here."""

    gpu_bytes: int | None = None
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Place:
    """Cores and devices for `resolve`. `gpu_bytes`: None on a CPU; `is_here`: the GPU's memory can be asked for."""

    machine: Machine
    is_here: bool
    gpu_bytes: int | None
    capability: tuple[int, int]


def place_of(config: EngineConfig, asked: Asked) -> Place:
    """Raises: ConfigError if a GPU is asked for that is not here, and its memory is not given."""
    found = machine.inspect()
    wants_gpu = config.device == "cuda" or (config.device == "auto" and (found.has_cuda or asked.gpu_bytes is not None))
    if not wants_gpu:
        return Place(found, False, None, CAPABILITY)
    if not found.has_cuda and asked.gpu_bytes is None:
        raise ConfigError("device", "there is no GPU here: give --gpu-memory, for example 141GiB, to check for one")
    is_here = found.has_cuda and asked.gpu_bytes is None
    # Of the GPU that is described there are as many as are asked for.
    num_gpus = found.num_gpus if is_here else max(found.num_gpus, config.tp_size)
    described = replace(found, has_cuda=True, num_gpus=num_gpus)
    return Place(described, is_here, asked.gpu_bytes, asked.capability or CAPABILITY)


def parse_bytes(text: str) -> int:
    """141GiB, 80GB or a number of bytes. Raises: ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * UNITS[match[2]])


def parse_capability(text: str) -> tuple[int, int]:
    """9.0. Raises: ValueError."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


Texts = dict[str, str]


class ModelPart(Struct, frozen=True, kw_only=True):
    """The target, as its config and the headers of its files have it. `stored`: bytes by format, in the files."""

    path: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    stored: dict[str, int]


class MemoryPart(Struct, frozen=True, kw_only=True):
    """What is held and what is left. Sizes in bytes; on a CPU `total` is 0, and `pool` is the budget of KV pages.

    `held`: by what it is for. `formats`: of the weights of target and draft, by the type of their tensors.
    `kv_tokens`: that fit.
    """

    total: int
    share: float
    held: dict[str, int]
    formats: dict[str, int]
    kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    kv_tokens: int


class DraftPart(Struct, frozen=True, kw_only=True):
    """What drafts, and how it fits the target."""

    method: str
    path: str | None
    numbers: tuple[int, int, int]  # steps, topk, draft tokens
    stored: dict[str, int]
    fits: Texts


class TextPart(Struct, frozen=True, kw_only=True):
    """What is made of text. `by_template`: a name that the chat template has decided."""

    tokenizer: str
    has_chat_template: bool
    tool_calls: str
    reasoning: str
    sampling_defaults: dict[str, float]


class CheckReport(Struct, frozen=True, kw_only=True):
    """The parts that could be read; `refused`: a sentence for each reason why it will not run."""

    will_run: bool
    refused: tuple[str, ...]
    notes: tuple[str, ...] = ()
    device: str = ""
    dtype: str = ""
    ranks: int = 1  # of several the first one's part is told: kernels and memory are those of each
    model: ModelPart | None = None
    kernels: Texts = {}
    memory: MemoryPart | None = None
    draft: DraftPart | None = None
    text: TextPart | None = None
