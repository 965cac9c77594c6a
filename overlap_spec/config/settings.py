"""`Settings`: the resolved, frozen configuration, with a section for each owner; and the other inputs of `resolve`."""

import ipaddress
import socket
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

MIB = 1 << 20
LOSSY = "LOSSY at temperature > 0"  # the label of every setting that changes the output's distribution
FORCE_GREEDY_NGRAM = "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"


class Machine(Struct, frozen=True):
    """The machine's facts that `resolve` needs. `num_cores`: cores that this process may use."""

    num_cores: int
    has_cuda: bool
    forces_greedy_verify: bool = False  # `forces_greedy_verify()`
    num_threads: int | None = None  # `asked_threads()`
    otlp_protocol: str | None = None  # `asked_otlp_protocol()`
    num_gpus: int = 1  # where there are any


class SamplingDefaults(Struct, frozen=True):
    """What OpenAI's endpoints use for a field that a request leaves out: OpenAI's values, or those of the model.

    `max_new_tokens`: of a chat; None is the context.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    def changes(self) -> dict[str, float]:
        """The values that are not OpenAI's."""
        plain = SamplingDefaults()
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value != getattr(plain, name)}


class ModelFiles(Struct, frozen=True, kw_only=True):
    """Local files of one target, and facts from its config; made by `hub.resolve_model` without torch.

    `weights`: a directory (config.json beside .safetensors or .bin) or a .gguf file. `config`: the
    Hugging Face config as a dict (from GGUF metadata for a .gguf). `tokenizer_dir` is None only with
    `skip_tokenizer_init`.
    """

    weights: str
    config: dict[str, Any]
    tokenizer_dir: str | None
    eos_token_ids: tuple[int, ...]
    context_length: int
    vocab_size: int
    preset_draft: str | None = None  # directory of the head that ships for this alias
    preset_spec: tuple[str, int, int, int] | None = None  # method, steps, topk, draft tokens of the alias
    load_format: str = "auto"
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # of generation_config.json
    quantization: str | None = None  # what the flag asks for
    chat_template: str | None = None  # the source of one to use instead of the tokenizer's


class ModelSettings(Struct, frozen=True):
    """Owner: worker (weights), frontend (tokenizer_dir, eos), server (names)."""

    name: str
    files: ModelFiles
    dtype: str
    device: str
    max_len: int  # tokens in a sequence, prompt and output
    aliases: tuple[str, ...] = ()  # further names in the API
    keeps_integers: bool = False  # linears of a .gguf file multiply by its integers, on a CPU
    deterministic: bool = False  # a request's tokens and log-probs have the same bits in any company


class AcceptSettings(Struct, frozen=True):
    """The rule of acceptance: matching, which is exact, unless flags choose another."""

    rejection: bool = False
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    ngram_force_greedy_verify: bool = False  # the target's argmax is committed at every temperature

    @property
    def thresholds(self) -> bool:
        """Whether a guess may be accepted that the target did not draw, which changes the output's distribution."""
        return self.threshold_single < 1 or self.threshold_acc < 1

    @property
    def asked_by(self) -> str | None:
        """The flag (or variable) that chooses another rule than matching; None if none does."""
        if self.ngram_force_greedy_verify:
            return FORCE_GREEDY_NGRAM
        if self.thresholds:
            return f"speculative_accept_threshold_{'single' if self.threshold_single < 1 else 'acc'}"
        return "speculative_use_rejection_sampling" if self.rejection else None

    def __str__(self) -> str:
        if self.ngram_force_greedy_verify:
            return f"match with the argmax ({FORCE_GREEDY_NGRAM}): {LOSSY}"
        if self.thresholds:
            return f"thresholds single {self.threshold_single:g}, acc {self.threshold_acc:g}: {LOSSY}"
        return "rejection sampling (exact in distribution)" if self.rejection else "match (exact, token for token)"


class AttentionSettings(Struct, frozen=True):
    """Owner: worker. Flags that replace the device's default attention kernels."""

    target_torch: bool = False
    draft_torch: bool = False
    prefill_kernel: bool = False  # verify windows of chains take the prefill kernels too
    target_in_order: bool = False  # the target's keys are added up in one order, whatever runs beside a row
    draft_window: int | None = None  # most keys that a row of the draft attends to


class NgramSettings(Struct, frozen=True):
    """Owner: worker. Limits on the length of matches and on the width of trees. Defaults are SGLang's."""

    min_match: int = 1
    max_match: int = 12
    min_breadth: int = 1
    max_breadth: int = 10
    by_frequency: bool = False  # else by recency
    branch: int = 18  # most tokens that are taken after a match
    capacity: int = 10_000_000  # tokens that the log of all requests holds
    corpus: str | None = None  # JSONL file of texts that the log holds from the start
    corpus_tokens: int = 10_000_000  # most tokens that are read of the corpus
    tokenizer_dir: str | None = None  # for a corpus


class SpecSettings(Struct, frozen=True):
    """Owner: worker. `width` W = num_draft_tokens: rows of the verify window, root included; 1 is plain decoding."""

    method: str
    draft_path: str | None
    num_steps: int
    topk: int
    width: int
    draft_load_format: str = "auto"
    narrower: tuple[int, ...] = ()  # widths below `width` that steps may also have, ascending; empty: fixed width
    token_map: str | None = None  # file of the target ids that the draft may guess
    accept: AcceptSettings = AcceptSettings()
    multi_layer: bool = False  # each draft step has an MTP layer of its own
    ngram: NgramSettings = NgramSettings()
    numbers_from: str = "given"  # the origin of steps, topk and width
    simulated_accept_lens: tuple[float, ...] = ()  # committed tokens a step, bonus included: acceptance is synthetic
    draft_quantization: str | None = None  # unquant, fp8 while loading; None: what the draft's config names
    divides_draft: bool = True  # among ranks; else each has all of it
    num_copied: int = 0  # guesses of n-grams, a branch beside a draft's chain

    @property
    def has_trees(self) -> bool:
        """Whether a draft's windows are trees."""
        return self.topk > 1 or self.num_copied > 0


class WidthRule(Struct, frozen=True):
    """From a `batch_size` on: the candidate numbers of draft steps, and the thresholds for changing between them.

    Fields and defaults are SGLang's, except `initial_steps`, which is resolved from the flags.
    """

    batch_size: int
    candidate_steps: tuple[Annotated[int, Meta(ge=0)], ...]
    ema_alpha: Annotated[float, Meta(gt=0, le=1)] = 0.2
    update_interval: Annotated[int, Meta(ge=1)] = 5
    warmup_batches: Annotated[int, Meta(ge=0)] = 10
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25
    ceiling_coeff: float = 0.0
    initial_steps: int = 0


class CacheSettings(Struct, frozen=True):
    """Owner: worker (sizes), scheduler (prefix cache)."""

    page_size: int
    max_total_tokens: int | None
    mem_fraction: float
    prefix_cache: bool
    kv_dtype: str | None = None  # torch's name; None: the model's
    # Of a target with recurrent states, of which the prefix cache has snapshots.
    state_ratio: float = 0.9  # bytes of states over bytes of KV pages
    max_states: int | None = None  # of slots and snapshots together, instead
    snapshot_interval: int = 256  # tokens between two snapshots of a prompt, at least


class SchedulerSettings(Struct, frozen=True):
    """Owner: scheduler. `depth`: steps in flight. `chunk_tokens` None: the worker measures it; -1: unbounded.

    `max_gap_s`: seconds that a prompt chunk may keep decoding requests waiting; None: as many as its size takes.
    """

    max_running_requests: int
    depth: int
    chunk_tokens: int | None
    seed: int | None
    width_rules: tuple[WidthRule, ...] = ()  # empty: adaptive widths follow measured costs
    keeps_width: bool = False  # explicit numbers: a step is narrower only if results show that no slot has a guess
    width_padding: tuple[int, ...] = ()  # batch sizes that a rule's batch is rounded up to
    max_gap_s: float | None = None
    schedule_policy: str = "fcfs"  # or lpm
    synthetic_acceptance: bool = False  # every log line with an accept length reports it
    windows_with_prompts: bool = False  # they share steps
    deterministic: bool = False  # see `ModelSettings`


class RecoverySettings(Struct, frozen=True):
    """Owner: supervisor and frontend. Whether dead processes are started again, and how often within `window_s`."""

    enabled: bool = False
    most: int = 3
    window_s: float = 600.0


class AuditSettings(Struct, frozen=True):
    """Owner: frontend; worker and scheduler keep slots for it. `rate`: share of finished requests; 0: none."""

    rate: float = 0.0
    action: str = "log"  # log, disable or stop: what follows a fault
    file: str | None = None  # of faults; None: one in the cache directory


class AdaptSettings(Struct, frozen=True):
    """Owner: worker and scheduler; the frontend asks whose requests may be learnt from. `share` 0: the draft stays.

    `names`: of API keys, whose requests alone are learnt from; None: all are. `save`: where a head is written that
    takes over; None: nowhere. `updates`: the operator may write another head over the one that serves.
    """

    share: float = 0.0
    names: tuple[str, ...] | None = None
    save: str | None = None
    updates: bool = False


class IsolationSettings(Struct, frozen=True):
    """Owner: frontend. `names`: of API keys, whose requests share nothing that is cached; (): all share everything.

    `shared_prefix`: a text that they share nevertheless, where a prompt begins with it.
    """

    names: tuple[str, ...] = ()
    shared_prefix: str = ""


OPERATOR = "admin"  # the name of the operator's key


class ApiKeys(Struct, frozen=True):
    """Whose each key is, by key, and the operator's key, which is also for what concerns all clients."""

    names: dict[str, str] = {}
    admin: str | None = None
    sharing: tuple[str, ...] = ()  # names whose requests a draft may learn from, marked so in the file

    def __repr__(self) -> str:
        return f"ApiKeys({len(self.names)} keys)"

    @property
    def first(self) -> str | None:
        """One that opens all that the keys guard; None without a key."""
        return self.admin or next(iter(self.names), None)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server on that address, or on those that a name has: `127.1`, its own."""
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


class HttpLimits(Struct, frozen=True):
    """What HTTP clients are allowed. Owner: the HTTP process, which needs it before the rest is resolved."""

    header_timeout_s: float = 20.0  # for a request's head: since the connection, or since its first byte
    body_timeout_s: float = 60.0  # for which a body may make no progress
    max_connections: int = 8192
    max_connections_per_address: int = 4096
    max_bytes: int = 1 << 30  # of bodies whose requests are not answered yet
    max_bytes_per_address: int = 256 * MIB


class OtlpTarget(Struct, frozen=True):
    """Where traces of requests are sent. `protocol`: grpc, or http/protobuf."""

    endpoint: str
    protocol: str


class ServerSettings(Struct, frozen=True):
    """Owner: the HTTP process."""

    host: str
    port: int
    keys: ApiKeys
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    cors_allow_origins: tuple[str, ...] = ()
    http: HttpLimits = HttpLimits()
    ui: bool = True  # the page at /ui
    otlp: OtlpTarget | None = None  # None: no traces of requests
    allowed_hosts: tuple[str, ...] = ()  # names of the server beside its own; *: any

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


class SupervisorSettings(Struct, frozen=True):
    """Owner: the process that watches the others. `watchdog_timeout_s`: without a heartbeat; 0: no limit."""

    watchdog_timeout_s: float = 60.0


class LinkSettings(Struct, frozen=True):
    """Owner: frontend. `client_endpoint` None: an ipc address in the run's private directory."""

    client_endpoint: str | None
    api_key: str | None
    max_queued_requests: int = 2048  # open ones beyond those that can run
    max_queued_bytes: int = 4 * MIB  # of a request's answer that its client does not read
    client_timeout_s: float = 10.0  # for which a client's process may leave heartbeats unanswered
    trusts_templates: bool = False  # a request may bring a chat template along
    max_client_messages: int = 4096  # of one client, sent and not read by the frontend
    max_client_bytes: int = 64 * MIB  # of one client, that wait to be read, in either direction
    max_bytes: int = 256 * MIB  # the same, of all clients
    request_timeout_s: float | None = None
    first_token_timeout_s: float | None = None
    key_names: dict[str, str] = {}  # by the keys that open the link; `api_key` is one of them, or the operator's
    admin_key: str | None = None
    isolation: IsolationSettings = IsolationSettings()


class Settings(Struct, frozen=True):
    """The resolved configuration. Each process gets all of it and gives each component only its section."""

    model: ModelSettings
    spec: SpecSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    server: ServerSettings
    link: LinkSettings
    skip_tokenizer_init: bool
    log_level: str
    num_threads: int  # compute threads of each rank of the worker; every other process has one
    threads_given: bool = False  # the user gave `num_threads`; otherwise the worker may choose fewer
    graph_batch_sizes: tuple[int, ...] = ()  # batches that are captured as CUDA graphs, ascending; none on a CPU
    compile_max_batch: int = 0  # batches up to here have their sampler compiled; 0: none
    logit_processor: str | None = None  # MODULE:NAME, which the worker imports
    features: tuple[str, ...] = ()  # packages of one's own that attach as features do
    spin_s: float = 0.0  # how long scheduler and worker poll for a message before they sleep
    attention: AttentionSettings = AttentionSettings()
    audit: AuditSettings = AuditSettings()
    adapt: AdaptSettings = AdaptSettings()
    recovery: RecoverySettings = RecoverySettings()
    proposes_forced: bool = True  # what a grammar leaves no choice about is guessed, if it is known in time
    supervisor: SupervisorSettings = SupervisorSettings()
    trace_dir: str | None = None  # directory of the processes' traces (`runtime/tracing.py`); None: no traces
    watched: bool = False  # processes record what they do while they are asked for it (`LiveTrace`)
    ranks: int = 1  # processes that share each layer (`config/ranks.py`)


def encode_settings(settings: Settings) -> bytes:
    """Settings as msgpack, for a child process."""
    return msgspec.msgpack.encode(settings)


def decode_settings(payload: bytes) -> Settings:
    """Inverse of `encode_settings`."""
    return msgspec.msgpack.decode(payload, type=Settings)
