"""The base of all messages, and the enums that several links use."""

import enum

import msgspec

TOKEN_BYTES = 4  # of a token id, where ids are packed: int32, little-endian


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of what travels between processes."""


class Phase(enum.StrEnum):
    """The kind of a step's part: prompts or decoding."""

    PREFILL = "prefill"
    DECODE = "decode"


class AbortReason(enum.StrEnum):
    """Why the frontend ends a request that the scheduler still runs."""

    CLIENT_GONE = "client_gone"
    STOP_STRING = "stop_string"
    REQUESTED = "requested"
    SHUTDOWN = "shutdown"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"


class ErrorCode(enum.StrEnum):
    """Why a request gets no answer; the server maps each to an HTTP status."""

    BAD_REQUEST = "bad_request"  # 400
    OVERLOADED = "overloaded"  # 503
    STARTING = "starting"  # 503
    SHUTTING_DOWN = "shutting_down"  # 503
    FAILED = "request_failed"  # 500, of this request alone: it kills the worker, or the frontend fails at it
    NOT_FINITE = "not_finite"  # 500, of this request alone: the target's logits are NaN or infinite
    TIMEOUT = "timeout"  # 504


class FinishKind(enum.StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a request ended, and on what: a stop string, a stop token's id, or nothing."""

    kind: FinishKind
    matched: str | int | None = None
    message: str = ""


class Phases(msgspec.Struct, frozen=True, array_like=True):
    """When one request that is traced passed from phase to phase: time.monotonic(), 0.0 where it never did."""

    received: float  # by the frontend
    admitted: float  # its prompt is encoded, it waits for a slot
    started: float  # it has one
    first_token: float
    last_token: float
    ended: float  # its last text is on its way
    detokenize_s: float  # seconds of all its steps: tokens to text, and the search for stops


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Running counts of one request, in tokens, except `spec_verify_ct` (decode steps that it took part in)."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    spec_verify_ct: int
