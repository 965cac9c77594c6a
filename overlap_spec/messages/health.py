"""The engine's state, as `/health` and the HTTP server's authentication are told it, the draft's, and its figures."""

import enum

import msgspec

from overlap_spec.messages.base import Message


class EngineState(enum.StrEnum):
    """What the engine is doing."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"  # an actor gives no heartbeat; requests wait
    RECOVERING = "recovering"  # actors are started again; requests wait
    DRAINING = "draining"
    FAILED = "failed"


class DraftState(enum.StrEnum):
    """Whether a draft's guesses are any good, from the best to the worst."""

    UNKNOWN = "unknown"  # there is none, or it has made too few guesses; n-grams are not judged
    HEALTHY = "healthy"
    COLLAPSED = "collapsed"  # right much less often than usual
    DEAD = "dead"  # hardly ever right


class DraftFigures(msgspec.Struct, frozen=True):
    """The draft for one class of requests: accept lengths, bonus included, of the last thousand steps and as usual."""

    state: DraftState
    accept_length: float
    usual_accept_length: float


class AdaptFigures(msgspec.Struct, frozen=True):
    """What a draft has learnt while it served. Accept lengths are those of the last judgement, of requests not learnt.

    `versions`: heads that have taken over; `dropped`: of these, those that live accept length fell with.
    """

    versions: int = 0
    dropped: int = 0
    refused: int = 0  # heads whose numbers were not finite
    steps: int = 0  # of training
    samples: int = 0  # requests in the ring
    seconds: float = 0.0  # of the device
    live_length: float = 0.0
    copy_length: float = 0.0
    gain: float = 0.0  # of the last head that took over, in accept length: 0.02 is 2%


class EngineHealth(msgspec.Struct, frozen=True):
    """The state, for how many seconds it has been so, and the actor that is the cause.

    `last_sign_s`: by actor, seconds since its last heartbeat. `draft`: a bad one costs time, and no token is wrong,
    so it does not change the state.
    """

    state: EngineState
    reason: str = ""
    actor: str = ""
    since_s: float = 0.0
    last_sign_s: dict[str, float] = {}
    draft: DraftState = DraftState.UNKNOWN

    @property
    def is_well(self) -> bool:
        """Whether a load balancer should send requests here."""
        return self.state is EngineState.READY

    @property
    def takes_requests(self) -> bool:
        """Whether a request that comes all the same is taken: it may have to wait."""
        return self.state in (EngineState.READY, EngineState.UNRESPONSIVE, EngineState.RECOVERING)


READY = EngineHealth(EngineState.READY)


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
    step_efficiency: float | None = None  # of decode steps: floor / time; None without them or without known ceilings
    gpu_gap: float = 0.0  # seconds, mean: device idle before a step that follows another without a pause
    host_time: float = 0.0  # seconds, mean: scheduling and launching a step
    host_time_hidden: float = 0.0  # seconds, mean: what of it the device did not wait for
    decode_steps_total: int = 0
    decode_floor_total: float = 0.0  # seconds that those steps take at least, at the device's ceilings; 0: not known
    drafts_total: int = 0  # verify steps with guesses
    accept_rate: float = 0.0  # guesses accepted of those verified
    step_width: int = 0  # of the last decode step
    num_steps: int = 0  # guesses in a row that it could verify; of a tree, levels
    decode_time_total: float = 0.0  # seconds of the device: decode steps, and its idle time before them
    draft_is_dead: bool = False  # of the last guesses hardly any was accepted
    # Known to the frontend alone, which adds them.
    recoveries_total: int = 0
    replayed_total: int = 0  # requests, each time
    poisonous_total: int = 0  # requests that were ended because the worker had died with them too often
    last_recovery: float = 0.0  # seconds, from the death until the engine was warm again
    draft_classes: dict[str, DraftFigures] = {}  # by class of requests, of those that were judged
    unshared_tokens_total: int = 0  # of prompts: another client had sent them before, and clients share nothing
    not_finite_total: int = 0  # requests that ended because the target's logits were NaN or infinite
    experts_read: float | None = None  # distinct ones that a layer reads in a decode step, mean; None of dense targets
    num_experts: int = 0  # of which there are so many in a layer
    # Of targets with recurrent states, of which the prefix cache has snapshots.
    snapshot_bytes: int = 0  # held
    max_snapshot_bytes: int = 0
    snapshot_lookups_total: int = 0  # requests, each time that one has got a slot and begins
    snapshot_hits_total: int = 0  # of these, those that went on from a snapshot
    recomputed_tokens_total: int = 0  # of output, in one order of sums: by steps of their own, as they were drawn
    adapt: AdaptFigures | None = None  # None: the draft stays as it is
    draft_updates_total: int = 0  # heads that were written over the draft by hand

    @property
    def draft_state(self) -> DraftState:
        """The worst of all classes of requests."""
        states = [figures.state for figures in self.draft_classes.values()]
        return max(states, key=list(DraftState).index, default=DraftState.UNKNOWN)
