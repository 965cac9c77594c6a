"""The inner links, in the order of the ring: frontend, scheduler, worker, and back."""

from typing import Generic

import msgspec
from msgspec.structs import replace

from overlap_spec.messages.base import AbortReason, ErrorCode, Finish, Message, Phase
from overlap_spec.messages.extensions import Carried
from overlap_spec.messages.facts import Roofline
from overlap_spec.messages.request import NO_METHOD, Verified
from overlap_spec.messages.sampling import SamplingParams

NO_TOKEN = -2  # ends a run of tokens where the target could draw none (`overlap_spec_kernels.NO_TOKEN`)
NEVER_S = 1e6  # so many seconds that nothing pays for them, nor for a part of them

# --- frontend -> scheduler --------------------------------------------------------------------------------


class Resumed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request was given before its scheduler died. `output`: its tokens, int32, little-endian."""

    output: bytes
    cached_tokens: int
    verify_steps: int


class Admit(Message, frozen=True):
    """A checked request. `sampling.max_new_tokens` and `sampling.seed` are set; `prompt`: int32, little-endian.

    `stop_ids`: what ends it, EOS included unless ignored; masked until `min_new_tokens` are out. `resumed`: it has
    output already, and goes on at the next token. `client`: whose it is; clients take turns while they wait.
    `salt`: the root of its keys in the prefix cache, after the first `public_len` tokens, which all may share.
    `is_learnt`: a draft may learn from it.
    """

    uid: int
    prompt: bytes
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    arrived_at: float
    resumed: Resumed | None = None
    client: str = ""
    salt: str = ""
    public_len: int = 0
    is_learnt: bool = False


class Abort(Message, frozen=True):
    """End a request; an unknown uid is ignored (it may just have finished)."""

    uid: int
    reason: AbortReason


class FlushCache(Message, frozen=True):
    """Empty the prefix cache if nothing runs. A worker of a self-drafting method empties its log of n-grams."""


class NewFrontend(Message, frozen=True):
    """The first message of a frontend that was started again alone. What comes before it is of the one that has died.

    Everything that one held ends. Replies go to links of this `generation` from now on.
    """

    generation: int


class Memo(Message, frozen=True):
    """What a feature's frontend knows and is not to forget if it dies: the scheduler sends the last one to the next.

    `state`: encoded by the feature.
    """

    feature: str
    state: bytes


# --- scheduler -> worker ----------------------------------------------------------------------------------


class Owner(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whose a request is, for a method that guesses from what requests said: it finds only what its owner's said.

    `number`: no other owner's, as long as the worker lives. `bands`: the part of the log that it may write, as
    `NgramLog.bands` has it.
    """

    number: int
    bands: int


class ResetSlot(Message, frozen=True):
    """A new request takes this slot; nothing of its predecessor survives.

    `prompt_len` tokens are prefilled before the first token is drawn (output so far included, after a preemption).
    `stop_from` is the first absolute position at which one of `stop_ids` may be drawn; `output_from` that of the
    request's output, whatever was prefilled. `uid`: what features know the request by; what they were told of it before
    may be left out of `sampling`. `allowed`: while it travels, which of the plan's lists are the sampling's
    `allowed_ids`; -1: none of them. `owner`: None: it has no salt, and may write everywhere.
    """

    sampling: SamplingParams
    prompt_len: int
    stop_ids: tuple[int, ...]
    stop_from: int
    output_from: int = 0
    uid: int = 0
    allowed: int = -1
    owner: Owner | None = None


class ChunkWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A chunk of one slot's prompt: `tokens` (int32, little-endian) at the positions start, start + 1, ..

    `next_token`: the prompt token that follows the chunk; -1: the chunk completes the prompt. `rows_out`: first and end
    of the positions whose rows leave the device, for log-probs of the prompt tokens after them. `num_drawn`: its last
    tokens that are output, computed again as windows compute it; the step has no other chunk then. Of a target with
    recurrent states, -1 or a snapshot of the worker's: `restored`, the state before the chunk; `snapshot`, after it.
    """

    slot: int
    start: int
    tokens: bytes
    next_token: int = -1
    rows_out: tuple[int, int] = (0, 0)
    restored: int = -1
    snapshot: int = -1
    num_drawn: int = 0


MOST_UNDRAFTED = 32  # steps after which nothing is drafted, one after another


class StepPlan(Message, Generic[Carried], frozen=True):
    """One step, in columns: slots whose windows it verifies, chunks of prompts, or both. Steps run in plan order.

    A step of both has two parts: windows, then prompts of other slots. The layers of both may run together.

    `width`: 1..W. Of the windows of `slots`, so many columns are verified and width - 1 guesses are proposed; the other
    columns hold no token. Prompts propose for windows of so many columns, which the step after it may exceed; beside
    windows, for those of `first_width`. `new_pages`: by slot, what is appended to its page table before the step.
    `resets`: by slot, of requests that take it; their chunks begin in this step. `drafts`: whether the draft takes part
    after it; beside windows, it always does after prompts. `allowed_lists`: of its requests, see `with_shared_lists`.
    """

    step_id: int
    width: int
    slots: list[int] = []
    new_pages: dict[int, list[int]] = {}
    chunks: list[ChunkWork] = []
    resets: dict[int, ResetSlot] = {}
    drafts: bool = True
    extensions: tuple[Carried, ...] = ()
    first_width: int = 0
    allowed_lists: list[bytes] = []

    @property
    def phase(self) -> Phase:
        """What a step of one part is of."""
        return Phase.PREFILL if self.chunks else Phase.DECODE

    @property
    def rows(self) -> list[int]:
        """The slot of each row of the results, in order."""
        return self.slots + [chunk.slot for chunk in self.chunks] if self.chunks else self.slots

    def parts(self) -> "tuple[StepPlan[Carried], ...]":
        """A plan for each part, in order. A step of one part is the part."""
        if not (self.slots and self.chunks):
            return (self,)
        slots = set(self.slots)
        grown = {slot: pages for slot, pages in self.new_pages.items() if slot in slots}
        begun = {slot: pages for slot, pages in self.new_pages.items() if slot not in slots}
        return (
            replace(self, new_pages=grown, chunks=[], resets={}, first_width=0),
            replace(self, width=self.first_width, slots=[], new_pages=begun, drafts=True, first_width=0),
        )


def with_shared_lists(plan: StepPlan) -> StepPlan:
    """The plan as it travels: allowed ids, which may be the whole vocabulary, once for all requests that share them."""
    if not plan.resets:
        return plan
    lists = list(dict.fromkeys(allowed for each in plan.resets.values() if (allowed := each.sampling.allowed_ids)))
    if not lists:
        return plan
    places = {allowed: place for place, allowed in enumerate(lists)}
    resets = {
        slot: _with_allowed(each, b"", places[allowed]) if (allowed := each.sampling.allowed_ids) else each
        for slot, each in plan.resets.items()
    }
    return replace(plan, resets=resets, allowed_lists=lists)


def with_own_lists(plan: StepPlan) -> StepPlan:
    """The plan as it was before it travelled."""
    lists = plan.allowed_lists
    if not lists:
        return plan
    resets = {
        slot: each if each.allowed < 0 else _with_allowed(each, lists[each.allowed], -1)
        for slot, each in plan.resets.items()
    }
    return replace(plan, resets=resets, allowed_lists=[])


def _with_allowed(reset: ResetSlot, allowed: bytes, place: int) -> ResetSlot:
    return replace(reset, sampling=replace(reset.sampling, allowed_ids=allowed), allowed=place)


# --- worker -> scheduler ----------------------------------------------------------------------------------


class StepCosts(Message, frozen=True):
    """What decode steps take, measured: seconds[i][j] for batch_sizes[i] and widths[j], both ascending.

    `widths` are all that a step may have; empty: each is as wide as the window. What takes `NEVER_S` is never run.
    `undrafted[i]`: a step of width 1 of a self-drafting method, after which nothing is drafted; empty for others.
    """

    batch_sizes: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    seconds: tuple[tuple[float, ...], ...] = ()
    undrafted: tuple[float, ...] = ()


class PrefillCosts(Message, frozen=True):
    """What a prefill step takes, measured: step_s + rows * token_s + pairs * pair_s + rows out * out_s seconds.

    Pairs are of a prompt token and a key that it attends to. Rows out leave the device (`ChunkWork.rows_out`).
    `padded_rows`: a step of no more rows than the last of these takes as long as one of the next of them, ascending.
    Without a `token_s` nothing was measured. Pairs of chunks of at least `long_chunk` (0: none) take `long_pair_s`.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    padded_rows: tuple[int, ...] = ()
    long_chunk: int = 0
    long_pair_s: float = 0.0
    out_s: float = 0.0

    def pair_s_of(self, num_tokens: int) -> float:
        """What a pair of such a chunk takes."""
        return self.long_pair_s if 0 < self.long_chunk <= num_tokens else self.pair_s


class TwoPartSizes(Message, frozen=True):
    """What steps of windows and prompts are padded to: windows of `width` columns to one of `batches`, ascending.

    Beside batches[i], prompts are padded to one of rows[i], ascending, and are of at most `chunks` requests. Without
    batches every step has one part.
    """

    width: int
    chunks: int
    batches: tuple[int, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()

    def batch_for(self, batch_size: int, width: int) -> int | None:
        """The index of the smallest batch that holds so many windows of this width."""
        if width != self.width:
            return None
        return next((i for i, size in enumerate(self.batches) if size >= batch_size), None)


class WorkerReady(Message, Generic[Carried], frozen=True):
    """All the scheduler knows of model, method and memory.

    `width`: the largest window W. `key_lookahead`: tokens after a position that its draft KV depends on (with 1,
    prefix-cache keys are bigrams). `chunk_tokens`: prompt tokens a prefill step may hold. `chunk_pairs`: (token, key)
    pairs of attention that take as long as so many tokens do otherwise, so that a chunk deep in a context gets shorter;
    0: attention is not counted. Page 0 is the dummy that padding writes to: pages 1..num_pages-1 are the pool.
    `max_deferred`: rows that the draft may leave unabsorbed at width 1; 0 where it leaves none. `is_self_drafting`:
    every window is filled whole, whatever the width of the step before. `num_steps`: guesses in a row that `method`
    makes, of a tree its levels. `step_widths`: all that a step may have, ascending; empty: W. `two_parts`: what steps
    of windows and prompts are padded to; None: they may have any size. `state_chunk`: layers of the target have a
    state of each slot, which pages do not hold; prompts are cut at multiples of so many positions, where that changes
    no bit; 0: there are no such layers. `num_snapshots`: copies of a slot's state that the worker has room for, each of
    `snapshot_bytes`; without any no prefix is shared of such a target. `extensions`: what features keep there, for
    their other parts.
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
    roofline: Roofline = Roofline()
    step_costs: StepCosts = StepCosts()
    max_deferred: int = 0
    is_self_drafting: bool = False
    method: str = NO_METHOD
    num_steps: int = 0
    step_widths: tuple[int, ...] = ()
    prefill_costs: PrefillCosts = PrefillCosts()
    two_parts: TwoPartSizes | None = None
    extensions: tuple[Carried, ...] = ()
    state_chunk: int = 0
    num_snapshots: int = 0
    snapshot_bytes: int = 0


class StepResult(Message, Generic[Carried], frozen=True):
    """What a step committed, in plan order: [] for an unfinished prompt, one token for a finished one, 1..W in decode.

    A step of windows and prompts has a result for each part, in order, which leaves when the part's tokens are out.
    `is_last`: no other result of the step follows. All else is of the part.
    `NO_TOKEN` ends a run where the target's logits were not finite: no token can be drawn, and none can come after it.
    In decode [] is a slot that was left out, because the masks of its grammar were late: nothing of it has changed.
    Seconds: `gpu_time`, the device's work on the step; `gpu_gap`, the device's idle time between the step before and
    this one, whatever the reason; `launch_time`, the host's launch, 0 where the host is the device. `caught_up`: the
    draft has absorbed rows of steps that had left it out, before this step's layers ran.

    `extensions`: what else some steps give by slot (`step_rows.py`).
    """

    step_id: int
    tokens: list[list[int]]
    num_proposed: list[int]  # guesses that might have been accepted: of a tree, its levels
    gpu_time: float
    gpu_gap: float = 0.0
    launch_time: float = 0.0
    extensions: tuple[Carried, ...] = ()
    caught_up: bool = False
    is_last: bool = True

    @property
    def is_typical(self) -> bool:
        """Whether its time is that of other steps of its width: the device did no work that they do not have."""
        return not self.caught_up


# --- scheduler -> frontend --------------------------------------------------------------------------------


class EngineLimits(Message, Generic[Carried], frozen=True):
    """The engine is warm. A request needs prompt + max_new_tokens <= max_len and <= max_total_tokens.

    `num_steps`: guesses in a row that `method` makes; 0 for plain decoding. `ahead_tokens`: with so many, the first
    prompts of those that come together get a step of their own, which an idle device begins at once; 0: they never do.
    `extensions`: the worker's.
    """

    max_len: int
    max_total_tokens: int
    max_running_requests: int
    vocab_size: int
    method: str = NO_METHOD
    num_steps: int = 0
    ahead_tokens: int = 0
    extensions: tuple[Carried, ...] = ()


class TokenDeltas(Message, Generic[Carried], frozen=True):
    """What one step committed, in columns. The scheduler's finishes are provisional: stop strings come later.

    Tokens after the finish are already cut; the token that ended the request (EOS, stop id) is included.
    `step_id` is 0 for an abort, which is no step's. `verify_steps` counts each request's so far. `verified`: by uid, of
    the requests that report it. `cached_tokens`: by uid, of requests whose prompt's last chunk was in the step.
    `extensions`: rows that the worker sent of the requests in `extended`, of tokens that were cut too; those of a
    prompt come by chunks, before its request's row.
    """

    uids: list[int]
    tokens: list[list[int]]
    finishes: list[Finish | None]
    verify_steps: list[int]
    step_id: int = 0
    verified: dict[int, Verified] = {}
    cached_tokens: dict[int, int] = {}
    extensions: list[Carried] = []
    extended: list[int] = []


class Started(Message, frozen=True):
    """These requests have a slot from now on: they are in the batch if the worker dies."""

    uids: list[int]


class Refused(Message, frozen=True):
    """The scheduler does not run this request."""

    uid: int
    code: ErrorCode
    message: str
    field: str = ""  # of the request, where one is why


class Flushed(Message, frozen=True):
    """Answer to FlushCache."""

    success: bool
