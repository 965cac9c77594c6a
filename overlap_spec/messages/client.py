"""The client link: between the frontend and its clients."""

from typing import Annotated

import msgspec

from overlap_spec.messages.audit import AuditReply, GetAudit
from overlap_spec.messages.base import ErrorCode, Finish, Message, Phases, Usage
from overlap_spec.messages.health import Stats
from overlap_spec.messages.request import (
    FEW,
    MAX_NAME_CHARS,
    MAX_WIRE_ID_CHARS,
    ChatPrompt,
    Prompt,
    Terms,
    TextPrompt,
    Verified,
)
from overlap_spec.messages.sampling import SamplingParams

RequestId = Annotated[str, msgspec.Meta(max_length=MAX_WIRE_ID_CHARS)]
Key = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
Owner = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]

CLIENTS_OF_A_FRONTEND = 10**9  # numbers that a frontend gives its clients, which are `Pong.session`


def is_another_frontend(before: int, session: int) -> bool:
    """Whether a session is of a frontend that has taken the place of the one before."""
    return session // CLIENTS_OF_A_FRONTEND > before // CLIENTS_OF_A_FRONTEND


# --- client -> frontend -----------------------------------------------------------------------------------


class Continued(msgspec.Struct, frozen=True, array_like=True):
    """What a client was given of a request by a frontend that is gone, maybe nothing: it goes on behind that.

    `output`: token ids, int32, little-endian. `num_chars`: of the text. The counts are those of its last usage.
    """

    output: bytes
    num_chars: Count
    cached_tokens: Count
    verify_steps: Count


class Generate(Message, frozen=True):
    """Start a request. `request_id` is the client's and unique among its open requests.

    `seed`: instead of that of `sampling`, which requests may share. `continued`: it was begun by another frontend.
    """

    request_id: RequestId
    prompt: Prompt
    sampling: SamplingParams
    terms: Terms = Terms()
    seed: int | None = None
    continued: Continued | None = None


class Shared(Message, frozen=True):
    """What requests have in common that follow it in the same sending; it takes the place of the last of this client.

    `samplings`: each an encoded `SamplingParams`.
    """

    prompts: Annotated[list[Prompt], FEW]
    samplings: Annotated[list[msgspec.Raw], FEW]


class GenerateShared(Message, frozen=True):
    """A `Generate` whose sampling, and whose prompt if it is a number, are those of the last `Shared`, by index."""

    request_id: RequestId
    prompt: Prompt | int
    sampling: int
    terms: Terms = Terms()
    seed: int | None = None
    continued: Continued | None = None


class Cancel(Message, frozen=True):
    """End a request of this client, or drop its Tokenize; an unknown id is ignored.

    `everyone`: requests of every client (all if id is ''), as users call them. `of_key`: those of the API key of this
    name alone; only a gateway may choose. `key`: the operator's, if there is one; all, and those of every key, need it.
    """

    request_id: RequestId
    everyone: bool = False
    key: Key = ""
    of_key: Key | None = None


class Ping(Message, frozen=True):
    """Ask whether the frontend is there. That a client is there, ZeroMQ's own heartbeats tell."""

    sent_at: float


class Tokenize(Message, frozen=True):
    """Ask for token ids. `owner`: whose turn it takes, as `Terms.client`."""

    request_id: RequestId
    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool = True
    owner: Owner = ""


class Detokenize(Message, frozen=True):
    """Ask for text. `ids`: int32, little-endian. `owner`: as of `Tokenize`."""

    request_id: RequestId
    ids: bytes
    skip_special_tokens: bool = False
    owner: Owner = ""


class Flush(Message, frozen=True):
    """Ask to empty the prefix cache; refused while anything runs. `key`: the operator's, if there is one."""

    request_id: RequestId
    key: Key = ""


class GetStats(Message, frozen=True):
    """Ask for the newest `Stats`. `of_key`: the name of the client's key; None: it may know what concerns others."""

    request_id: RequestId
    of_key: str | None = None


class UpdateDraft(Message, frozen=True):
    """Ask to write a checkpoint's weights over the draft's. `path`: on the engine's disk; `key`: the operator's."""

    request_id: RequestId
    path: str
    load_format: str = "auto"
    key: Key = ""


AskedById = Generate | Cancel | Tokenize | Detokenize | Flush | GetStats | GetAudit | UpdateDraft  # answers name the id
Asked = AskedById | Ping
ToFrontendFromClient = Asked | Shared | GenerateShared


# --- frontend -> client -----------------------------------------------------------------------------------


class LogProbs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probs of a run of tokens: one record of pairs (log-prob, token id) for each, all numbers float64, packed.

    record    the token | `top` most probable tokens, best first | `listed` tokens that were asked for

    Little-endian. NaN: there is no log-prob; an id of -1: there is no such token. `names`: the bytes of every token.
    `first`: of a part of a prompt's, how many tokens were in the parts before it.
    """

    records: bytes
    top: int
    listed: int
    names: dict[int, bytes]
    first: int = 0


class TextDeltas(Message, frozen=True):
    """What one step added, one row per request of this client (columns of equal length).

    `texts` and `token_ids` are increments. A row whose finish is not None is the request's last. `verified`: by request
    id, of those that report it. So are `log_probs`, of `token_ids`, and `phases`, of those that are traced, with the
    last row. `prompt_log_probs` come in parts as they are computed: in rows without tokens before the first one that
    has some, or ends the request. A part that begins at token 0 takes the place of those before it.
    """

    request_ids: list[str]
    texts: list[str]
    token_ids: list[list[int]]
    finishes: list[Finish | None]
    usages: list[Usage]
    verified: dict[str, Verified] = {}
    log_probs: dict[str, LogProbs] = {}
    prompt_log_probs: dict[str, LogProbs] = {}
    phases: dict[str, Phases] = {}


class Rejected(Message, frozen=True):
    """The request ends without an answer (before its first token, or because the engine failed)."""

    request_id: str
    code: ErrorCode
    message: str
    field: str = ""


class Pong(Message, frozen=True):
    """Answer to Ping. `ready` is False until the engine is warm.

    `session` changes when the frontend has given this client up and then heard of it again, or when another one has
    taken its place (`is_another_frontend`): every request that was open before is gone.
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
    stats: Stats


class DraftUpdated(Message, frozen=True):
    """Answer to UpdateDraft, if it was done."""

    request_id: str


ToClient = TextDeltas | Rejected | Pong | Tokenized | Detokenized | FlushDone | StatsReply | AuditReply | DraftUpdated
