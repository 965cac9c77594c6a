"""What travels on each link: tagged, array-like, frozen msgspec structs, one union type per link.

Not here: sockets (`transport.py`) and behaviour. A struct is named for where it goes. Times are seconds
as float (monotonic clock of the machine), sizes are counts of tokens unless the name says otherwise.
A new field goes last, with a default, so that old payloads still decode.

    client ==Generate,Cancel,..==> tokenizer --Admit,Abort--> scheduler --StepPlan--> worker
    client <==TextDeltas,..======= tokenizer <--TokenDeltas-- scheduler <-StepResult- worker
"""

import enum
import math
from typing import Any

import msgspec

from overlap_spec.errors import RequestError

MAX_STOP_IDS = 64  # ids per request, EOS included: the width of the worker's stop-id rows
MAX_STOP_STRINGS = 16


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of what travels between processes."""


class Phase(enum.StrEnum):
    """A step is one or the other, never both."""

    PREFILL = "prefill"
    DECODE = "decode"


class AbortReason(enum.StrEnum):
    """Why the tokenizer ends a request that the scheduler still runs."""

    CLIENT_GONE = "client_gone"
    STOP_STRING = "stop_string"
    REQUESTED = "requested"
    SHUTDOWN = "shutdown"


class ErrorCode(enum.StrEnum):
    """Why a request gets no answer; the server maps each to an HTTP status."""

    BAD_REQUEST = "bad_request"  # 400
    OVERLOADED = "overloaded"  # 503
    STARTING = "starting"  # 503
    SHUTTING_DOWN = "shutting_down"  # 503
    FAILED = "failed"  # 500


class FinishKind(enum.StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """How a request ended, and on what: a stop string, a stop token's id, or nothing."""

    kind: FinishKind
    matched: str | int | None = None
    message: str = ""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Running counts of one request, in tokens, except `spec_verify_ct` (decode steps that it took part in)."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    spec_verify_ct: int


# --- requests ---------------------------------------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's tokens are drawn and when it ends. Names and defaults are SGLang's.

    `max_new_tokens=None` means up to the model's context; `seed=None` means the engine draws one.
    Raises: RequestError naming the field that is out of range.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0  # <= 1e-6 is greedy
    top_k: int = -1  # -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    def __post_init__(self) -> None:
        for field, value, ok, want in self._ranges():
            if not ok:
                raise RequestError(field, f"{field} must be {want}, got {value!r}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise RequestError("min_new_tokens", "min_new_tokens must not exceed max_new_tokens")

    def _ranges(self) -> tuple[tuple[str, object, bool, str], ...]:
        most = self.max_new_tokens
        return (
            ("max_new_tokens", most, most is None or most >= 1, "at least 1"),
            ("min_new_tokens", self.min_new_tokens, self.min_new_tokens >= 0, "at least 0"),
            (
                "temperature",
                self.temperature,
                math.isfinite(self.temperature) and self.temperature >= 0,
                "a finite number >= 0",
            ),
            ("top_k", self.top_k, self.top_k == -1 or self.top_k >= 1, "-1 or at least 1"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", self.seed, self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            (
                "stop",
                self.stop,
                len(self.stop) <= MAX_STOP_STRINGS and all(self.stop),
                f"at most {MAX_STOP_STRINGS} non-empty strings",
            ),
            (
                "stop_token_ids",
                self.stop_token_ids,
                len(self.stop_token_ids) <= MAX_STOP_IDS // 2 and all(i >= 0 for i in self.stop_token_ids),
                f"at most {MAX_STOP_IDS // 2} token ids >= 0",
            ),
        )

    @property
    def greedy(self) -> bool:
        """True if every token is the argmax; the bound is SGLang's."""
        return self.temperature <= 1e-6


class TextPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Plain text; special tokens are added as the tokenizer's own post-processor does."""

    text: str


class ChatPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """OpenAI-style messages, rendered by the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True


class TokenPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Token ids, packed: int32, little-endian."""

    ids: bytes


Prompt = TextPrompt | ChatPrompt | TokenPrompt


# --- client -> tokenizer ----------------------------------------------------------------------------------


class Generate(Message, frozen=True):
    """Start a request. `request_id` is the client's and unique among its open requests."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams


class Cancel(Message, frozen=True):
    """End a request of this client; an unknown id is ignored. `everyone` ends it whoever owns it (all if id is '')."""

    request_id: str
    everyone: bool = False


class Ping(Message, frozen=True):
    """Heartbeat: a client that is silent too long is gone, and its requests are aborted."""

    sent_at: float


class Tokenize(Message, frozen=True):
    """Ask for token ids."""

    request_id: str
    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool = True


class Detokenize(Message, frozen=True):
    """Ask for text. `ids`: int32, little-endian."""

    request_id: str
    ids: bytes
    skip_special_tokens: bool = False


class Flush(Message, frozen=True):
    """Ask to empty the prefix cache; refused while anything runs."""

    request_id: str


class GetStats(Message, frozen=True):
    """Ask for the newest `Stats`."""

    request_id: str


ToTokenizerFromClient = Generate | Cancel | Ping | Tokenize | Detokenize | Flush | GetStats


# --- tokenizer -> client ----------------------------------------------------------------------------------


class TextDeltas(Message, frozen=True):
    """What one step added, one row per request of this client (columns of equal length).

    `texts` and `token_ids` are increments. A row whose finish is not None is the request's last.
    """

    request_ids: list[str]
    texts: list[str]
    token_ids: list[list[int]]
    finishes: list[Finish | None]
    usages: list[Usage]


class Rejected(Message, frozen=True):
    """The request ends without an answer (before its first token, or because the engine failed)."""

    request_id: str
    code: ErrorCode
    message: str
    field: str = ""


class Pong(Message, frozen=True):
    """Answer to Ping. `ready` is False until the engine is warm.

    `session` changes when the tokenizer has given this client up and then heard of it again: whatever was
    open before is gone.
    """

    sent_at: float
    ready: bool
    session: int = 0


class Tokenized(Message, frozen=True):
    """Answer to Tokenize. `ids`: int32, little-endian."""

    request_id: str
    ids: bytes


class Detokenized(Message, frozen=True):
    """Answer to Detokenize."""

    request_id: str
    text: str


class FlushDone(Message, frozen=True):
    """Answer to Flush."""

    request_id: str
    success: bool


class StatsReply(Message, frozen=True):
    """Answer to GetStats."""

    request_id: str
    stats: "Stats"


ToClient = TextDeltas | Rejected | Pong | Tokenized | Detokenized | FlushDone | StatsReply


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


# --- supervisor -------------------------------------------------------------------------------------------


class Shutdown(Message, frozen=True):
    """Stop; with `drain` finish open requests first (the supervisor bounds the time)."""

    drain: bool


class ActorReady(Message, frozen=True):
    """An actor is warm. `facts` fill the start-up table."""

    actor: str
    facts: dict[str, str | int | float]


class ActorFailed(Message, frozen=True):
    """An actor is about to exit on an exception."""

    actor: str
    error: str
    traceback: str


class ActorProgress(Message, frozen=True):
    """A line for the person who waits: what is being loaded, done out of total (0: unknown)."""

    actor: str
    what: str
    done: int
    total: int


class Drained(Message, frozen=True):
    """The tokenizer has no open request left after Shutdown(drain=True)."""


ToScheduler = WorkerReady | StepResult | Admit | Abort | FlushCache | Shutdown
ToWorker = StepPlan | Shutdown
ToTokenizer = EngineLimits | TokenDeltas | Refused | Flushed | Stats | Shutdown
ToSupervisor = ActorReady | ActorFailed | ActorProgress | Drained
