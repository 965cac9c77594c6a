"""What a check has found: one struct for each part of the table. It imports no torch."""

from msgspec import Struct

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
