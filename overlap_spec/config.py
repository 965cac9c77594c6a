"""What a user asks for (`EngineConfig`, one field per flag) and what is run (`Settings`, by owner).

Not here: how the one becomes the other (`resolve.py`), argparse (`cli/`), files and hubs (`hub/`). The environment
is read here and nowhere else.
"""

import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from overlap_spec.config_speculation import Algorithm, SpeculationFlags, Text
from overlap_spec.draft_kind import DraftKind

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "pt", "gguf", "dummy"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MODEL = "smollm2"
SMOLLM2_SPEC = ("EAGLE3", 3, 1, 4)  # what that alias runs with: method, steps, topk, draft tokens
PLAIN: Algorithm = "NONE"
TOKEN_MAPPED: tuple[Algorithm, ...] = ("EAGLE", "STANDALONE", "NEXTN")  # their head is whole, so rows of it do too
LANGUAGE_MODEL_DRAFTS: tuple[Algorithm, ...] = ("STANDALONE",)  # their draft has a tokenizer of its own to compare
LANGUAGE_MODEL_SPEC = (3, 1, 4)  # steps, topk, draft tokens of such a draft, whatever its target: SGLang's
NGRAM = "NGRAM"  # guesses from what was said before, without a model
MTP: Algorithm = "NEXTN"  # a layer in the target's own checkpoint
OWN_LAYER: tuple[Algorithm, ...] = ("EAGLE", MTP)  # without a draft path, these mean that layer
DRAFT_KINDS: dict[str, tuple[DraftKind, ...]] = {  # what methods draft with: the first, or another that they run too
    "EAGLE": (DraftKind.EAGLE_2, DraftKind.MTP),
    "EAGLE3": (DraftKind.EAGLE_3,),
    MTP: (DraftKind.MTP,),
    "STANDALONE": (DraftKind.LANGUAGE_MODEL,),
}
DUMMY: Literal["dummy"] = "dummy"  # the load format of random weights
MIB = 1 << 20


class EngineConfig(SpeculationFlags, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field per flag; `--page-size` is `page_size`. None means automatic. Names and defaults are SGLang's."""

    model_path: Annotated[
        Text, Meta(description="alias (smollm2), Hugging Face directory, .gguf file or hub id of the target model")
    ] = DEFAULT_MODEL
    tokenizer_path: Annotated[Text | None, Meta(description="directory with tokenizer.json; default: the model's")] = (
        None
    )
    load_format: Annotated[
        LoadFormat,
        Meta(description="format of the weights; auto: what is there; dummy: random, from config.json alone"),
    ] = "auto"
    revision: Annotated[
        Text | None, Meta(description="branch, tag or commit of the model on the hub; default: main")
    ] = None
    trust_remote_code: Annotated[bool, Meta(description="accepted: no remote code is ever needed or run")] = False
    served_model_name: Annotated[Text | None, Meta(description="model name in the API; default: the model path")] = None
    dtype: Annotated[Dtype, Meta(description="auto: float32 on a CPU, bfloat16 on CUDA")] = "auto"
    device: Annotated[Device, Meta(description="auto: cuda where there is one")] = "auto"
    tp_size: Annotated[int, Meta(ge=1, description="GPUs that share each layer; 1 until there is more")] = 1
    attention_backend: Annotated[
        Text, Meta(description="auto, triton (our kernels) or torch (their plain twins, without CUDA graphs)")
    ] = "auto"
    context_length: Annotated[int, Meta(ge=16, description="tokens; default: the model's context")] | None = None
    skip_tokenizer_init: Annotated[bool, Meta(description="serve token ids only")] = False
    random_seed: (
        Annotated[int, Meta(ge=0, le=2**63 - 1, description="seeds the requests that give none; default: drawn")] | None
    ) = None

    host: Annotated[str, Meta(description="address of the HTTP server")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP server; 0: any free one")] = 30000
    api_key: Annotated[Text | None, Meta(description="required as bearer token, and on a public ZMQ endpoint")] = None
    zmq_endpoint: Annotated[
        Text | None, Meta(description="public address of the ZMQ client link; default: ipc in a private directory")
    ] = None
    log_level: Annotated[LogLevel, Meta(description="log level of every process")] = "info"

    mem_fraction_static: (
        Annotated[float, Meta(gt=0, lt=1, description="share of GPU memory for weights and KV pages")] | None
    ) = None
    max_total_tokens: Annotated[int, Meta(ge=16, description="tokens in the KV pool; default: from memory")] | None = (
        None
    )
    max_running_requests: (
        Annotated[int, Meta(ge=1, le=4096, description="slots; default 48 with speculation")] | None
    ) = None
    chunked_prefill_size: Annotated[
        int | None, Meta(description="prompt tokens in a prefill step; -1: unbounded; default: from the machine")
    ] = None
    page_size: Annotated[int, Meta(ge=1, le=256, description="tokens in a KV page")] = 16
    disable_radix_cache: Annotated[bool, Meta(description="no prefix cache")] = False
    disable_overlap_schedule: Annotated[bool, Meta(description="one step in flight instead of two")] = False

    disable_cuda_graph: Annotated[bool, Meta(description="launch every operation of a decode step by itself")] = False
    cuda_graph_max_bs: (
        Annotated[int, Meta(ge=1, description="largest batch that runs as a CUDA graph; default: all that can run")]
        | None
    ) = None
    cuda_graph_bs: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=4096)], ...] | None,
        Meta(description="batch sizes that are captured as CUDA graphs; default: chosen up to the largest"),
    ] = None

    enable_torch_compile: Annotated[
        bool, Meta(description="compile what is no kernel of ours, the sampler without filters, before the capture")
    ] = False
    torch_compile_max_bs: (
        Annotated[int, Meta(ge=1, description="largest batch that is compiled; default with torch.compile: 32")] | None
    ) = None


class Machine(Struct, frozen=True):
    """What `resolve` needs to know of the machine. `num_cores` is what this process may use."""

    num_cores: int
    has_cuda: bool
    forces_greedy_ngram: bool = False  # `forces_greedy_ngram()`
    num_threads: int | None = None  # `asked_threads()`


class ModelFiles(Struct, frozen=True, kw_only=True):
    """Local files of one target, and what its config says; made by `hub.resolve_model` without torch.

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


class ModelSettings(Struct, frozen=True):
    """Owner: worker (weights), tokenizer (tokenizer_dir, eos), server (names)."""

    name: str
    files: ModelFiles
    dtype: str
    device: str
    max_len: int  # tokens in a sequence, prompt and output


class AcceptSettings(Struct, frozen=True):
    """How guesses are judged: by matching, which is exact, unless something else was asked for."""

    rejection: bool = False
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    ngram_force_greedy_verify: bool = False  # the target's argmax stands, whatever the temperature

    @property
    def thresholds(self) -> bool:
        """Whether a guess may stand that the target did not draw: then the output's distribution changes."""
        return self.threshold_single < 1 or self.threshold_acc < 1

    def __str__(self) -> str:
        if self.ngram_force_greedy_verify:
            return "match with the argmax (SGLANG_NGRAM_FORCE_GREEDY_VERIFY): LOSSY at temperature > 0"
        if self.thresholds:
            return f"thresholds single {self.threshold_single:g}, acc {self.threshold_acc:g}: LOSSY at temperature > 0"
        return "rejection sampling (exact in distribution)" if self.rejection else "match (exact, token for token)"


class AttentionSettings(Struct, frozen=True):
    """Owner: worker. What runs attention, where that is not what is fastest on the device."""

    target_torch: bool = False
    draft_torch: bool = False
    prefill_kernel: bool = False  # for the windows of chains too
    draft_window: int | None = None  # keys that a row of the draft sees at most


class NgramSettings(Struct, frozen=True):
    """Owner: worker. What counts as a match, and how wide trees get. Defaults are SGLang's."""

    min_match: int = 1
    max_match: int = 12
    min_breadth: int = 1
    max_breadth: int = 10
    by_frequency: bool = False  # else by recency
    branch: int = 18  # tokens that follow a match, at most
    capacity: int = 10_000_000  # tokens that are kept of all requests
    corpus: str | None = None  # JSONL file of texts that are there from the start
    corpus_tokens: int = 10_000_000  # of it, at most
    tokenizer_dir: str | None = None  # for a corpus


class SpecSettings(Struct, frozen=True):
    """Owner: worker. `width` W = num_draft_tokens: rows of the verify window, root included; 1 is plain decoding."""

    method: str
    draft_path: str | None
    num_steps: int
    topk: int
    width: int
    draft_load_format: str = "auto"
    narrower: tuple[int, ...] = ()  # widths below `width` that steps may have too, ascending; none: it is fixed
    token_map: str | None = None  # file of the target ids that the draft may guess
    accept: AcceptSettings = AcceptSettings()
    multi_layer: bool = False  # MTP layers, one for each draft step
    ngram: NgramSettings = NgramSettings()
    numbers_from: str = "given"  # where steps, topk and width come from
    simulated_accept_len: float | None = None  # committed tokens a step, bonus included: acceptance is synthetic


class WidthRule(Struct, frozen=True):
    """From a `batch_size` on: which numbers of draft steps there may be, and when one is left for another.

    Fields and defaults are SGLang's, except `initial_steps`, which is settled from the flags.
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


class SchedulerSettings(Struct, frozen=True):
    """Owner: scheduler. `depth`: steps in flight. `chunk_tokens` None: the worker measures it; -1: unbounded."""

    max_running_requests: int
    depth: int
    chunk_tokens: int | None
    seed: int | None
    width_rules: tuple[WidthRule, ...] = ()  # none: step widths follow measured costs, where they may change at all
    keeps_width: bool = False  # explicit numbers: steps are narrower only where no slot has a guess, if results say so
    width_padding: tuple[int, ...] = ()  # batch sizes that a rule's batch is rounded up to
    synthetic_acceptance: bool = False  # said in every log line that shows an accept length


class ServerSettings(Struct, frozen=True):
    """Owner: the HTTP process."""

    host: str
    port: int
    api_key: str | None


class LinkSettings(Struct, frozen=True):
    """Owner: tokenizer. `client_endpoint` None: an ipc address in the run's private directory."""

    client_endpoint: str | None
    api_key: str | None
    max_open_requests: int = 2048
    max_queued_bytes: int = 4 * MIB  # per client that does not read
    client_timeout_s: float = 10.0


class Settings(Struct, frozen=True):
    """What is run. Each process is handed all of it and gives each component its section only."""

    model: ModelSettings
    spec: SpecSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    server: ServerSettings
    link: LinkSettings
    skip_tokenizer_init: bool
    log_level: str
    num_threads: int  # compute threads of the worker; every other process has one
    threads_given: bool = False  # by the user: else fewer may do
    spin_count: int = 0  # how often a waiting thread of the worker looks before it sleeps (`waiting.py`)
    graph_batch_sizes: tuple[int, ...] = ()  # batches that are captured as CUDA graphs, ascending; none on a CPU
    compile_max_batch: int = 0  # batches up to here have their sampler compiled; 0: none
    spin_s: float = 0.0  # how long scheduler and worker poll for each other's next word before they sleep
    attention: AttentionSettings = AttentionSettings()
    trace_dir: str | None = None  # where every process leaves what it did when (`tracing.py`); None: nobody asks


def is_own_method(method: str) -> bool:
    """True of `MODULE:METHOD`, which names a `Method` of a module outside of this package."""
    return ":" in method


def synthetic_acceptance(mean: float) -> str:
    """What every output says of a run whose accept decision is made up."""
    return f"synthetic acceptance: {mean:g} committed tokens a step on average, whatever the guesses"


def child_environment(settings: Settings, role: str) -> dict[str, str]:
    """The environment of a child process. What the user says of threads stands.

    Of torch's two ways to ask the BLAS, cuBLASLt chooses faster tiles for long rows of W at 256 rows of x, and hardly
    others elsewhere (benchmarks/results/choosing/wide_h200.txt, F). float32 is left as it was tested.
    """
    is_worker = role == "worker"
    threads, spin = (settings.num_threads, settings.spin_count) if is_worker else (1, 0)
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(spin), "KMP_BLOCKTIME": str(min(spin, 1))}
    return {
        **({"TORCH_BLAS_PREFER_CUBLASLT": "1"} if is_worker and settings.model.dtype != "float32" else {}),
        **({} if says_how_to_wait() else waiting),  # all of them, or none: one overrides another
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def says_how_to_wait() -> bool:
    """True if the user has said how OpenMP's threads wait for work."""
    return any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"))


def waiting_fact() -> str:
    """How this process's OpenMP threads wait, whoever has said so."""
    said = (f"{name}={os.environ[name]}" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ)
    return " ".join(said) or "as OpenMP likes"


def asked_threads() -> int | None:
    """The threads that the user wants, by OMP_NUM_THREADS; None if it says nothing."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def own_environment() -> dict[str, str]:
    """The environment that this process was given, for one that is none of the engine's."""
    return dict(os.environ)


def asks_for_spec_v2() -> bool:
    """True if SGLANG_ENABLE_SPEC_V2 is set: overlap is always on here, and the log says so."""
    return "SGLANG_ENABLE_SPEC_V2" in os.environ


def forces_greedy_ngram() -> bool:
    """True if SGLANG_NGRAM_FORCE_GREEDY_VERIFY is switched on, in one of SGLang's ways to say so."""
    return os.environ.get("SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "").lower() in ("1", "true", "yes", "y", "on", "t")


def cache_directory() -> str:
    """Where downloaded default weights live."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("OVERLAP_SPEC_CACHE") or os.path.join(base, "overlap-spec")


def encode_settings(settings: Settings) -> bytes:
    """Settings as msgpack, for a child process."""
    return msgspec.msgpack.encode(settings)


def decode_settings(payload: bytes) -> Settings:
    """Inverse of `encode_settings`."""
    return msgspec.msgpack.decode(payload, type=Settings)
