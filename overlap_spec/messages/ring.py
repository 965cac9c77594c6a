"""The inner links, in the order of the ring: tokenizer, scheduler, worker, and back. Not here: clients, supervisor."""

from overlap_spec.messages.base import AbortReason, ErrorCode, Finish, Message, Phase, Usage
from overlap_spec.messages.request import SamplingParams

# --- tokenizer -> scheduler -------------------------------------------------------------------------------


class Admit(Message, frozen=True):
    """A checked request. `sampling.max_new_tokens` and `sampling.seed` are set; `prompt`: int32, little-endian.

    `stop_ids`: what ends it, EOS included unless ignored; masked until `min_new_tokens` are out.
    """

    uid: int
    prompt: bytes
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    arrived_at: float


class Abort(Message, frozen=True):
    """End a request; an unknown uid is ignored (it may just have finished)."""

    uid: int
    reason: AbortReason


class FlushCache(Message, frozen=True):
    """Empty the prefix cache if nothing runs."""


# --- scheduler -> worker ----------------------------------------------------------------------------------


class ResetSlot(Message, frozen=True):
    """A new request takes this slot; nothing of its predecessor survives.

    `prompt_len` tokens are prefilled before the first token is drawn (output so far included, after a
    preemption). `stop_from` is the first absolute position at which one of `stop_ids` may be drawn.
    """

    sampling: SamplingParams
    prompt_len: int
    stop_ids: tuple[int, ...]
    stop_from: int


class SlotWork(Message, frozen=True):
    """One slot's part of a step.

    `new_pages` are appended to the slot's page table before the step. In prefill `prompt_chunk` (int32,
    little-endian) holds the tokens at positions start, start+1, ..; `next_token` is the prompt token that
    follows the chunk, or -1 when the chunk completes the prompt and the target draws the next token. In
    decode both are empty, and `start` is unused (the device knows its length).
    """

    slot: int
    new_pages: list[int] = []
    start: int = 0
    prompt_chunk: bytes = b""
    next_token: int = -1
    reset: ResetSlot | None = None


class StepPlan(Message, frozen=True):
    """One step: which slots, and how wide the window (1..W) is. Steps run in the order they are sent."""

    step_id: int
    phase: Phase
    work: list[SlotWork]
    width: int


# --- worker -> scheduler ----------------------------------------------------------------------------------


class WorkerReady(Message, frozen=True):
    """All the scheduler knows of model, method and memory.

    `width`: the largest window W. `key_lookahead`: 1 if a position's draft KV depends on the next token
    (prefix-cache keys are then bigrams), else 0. `chunk_tokens`: prompt tokens a prefill step may hold.
    `chunk_pairs`: (token, key) pairs of attention that take as long as so many tokens do otherwise, so that a chunk
    deep in a context gets shorter; 0: attention is not counted.
    Page 0 is the dummy that padding writes to: pages 1..num_pages-1 are the pool.
    """

    num_slots: int
    num_pages: int
    page_size: int
    max_len: int
    width: int
    max_depth: int
    key_lookahead: int
    vocab_size: int
    chunk_tokens: int
    chunk_pairs: int = 0


class StepResult(Message, frozen=True):
    """What a step committed, in plan order: [] for an unfinished prompt, one token for a finished one, 1..W in decode.

    `num_proposed`: guesses that were verified. `gpu_time`: seconds the device worked on the step.
    """

    step_id: int
    tokens: list[list[int]]
    num_proposed: list[int]
    gpu_time: float


# --- scheduler -> tokenizer -------------------------------------------------------------------------------


class EngineLimits(Message, frozen=True):
    """The engine is warm. A request needs prompt + max_new_tokens <= max_len and <= max_total_tokens."""

    max_len: int
    max_total_tokens: int
    max_running_requests: int
    vocab_size: int


class TokenDeltas(Message, frozen=True):
    """What one step committed, in columns. The scheduler's finishes are provisional: stop strings come later.

    Tokens after the finish are already cut; the token that ended the request (EOS, stop id) is included.
    """

    uids: list[int]
    tokens: list[list[int]]
    finishes: list[Finish | None]
    usages: list[Usage]


class Refused(Message, frozen=True):
    """The scheduler does not run this request."""

    uid: int
    code: ErrorCode
    message: str


class Flushed(Message, frozen=True):
    """Answer to FlushCache."""

    success: bool


class Stats(Message, frozen=True):
    """A periodic report; counters are cumulative since start. Ratios and rates are over the last interval."""

    num_running: int = 0
    num_queued: int = 0
    num_used_tokens: int = 0  # held by running requests (pages x page_size)
    num_cached_tokens: int = 0  # held by the prefix cache alone
    max_total_tokens: int = 0
    token_usage: float = 0.0  # 0..1
    gen_throughput: float = 0.0  # tokens / s
    accept_length: float = 0.0  # committed tokens per verify step, bonus included
    step_time: float = 0.0  # seconds, mean
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    verify_steps_total: int = 0  # one per request and decode step; discarded steps are not counted
    committed_tokens_total: int = 0  # whole runs, before a finish cuts them
    proposed_tokens_total: int = 0
    requests_total: int = 0
    aborted_total: int = 0
    preempted_total: int = 0
    steps_total: int = 0
    accepted_per_position_total: tuple[int, ...] = ()  # guesses accepted at positions 1..K
