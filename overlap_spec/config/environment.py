"""Reads the environment, and makes that of child processes. No other module reads environment variables."""

import importlib.util
import os
import stat
import sys

from overlap_spec.config.ranks import rank_of
from overlap_spec.config.settings import FORCE_GREEDY_NGRAM, Settings

PREFIX = "OVERLAP_SPEC"
POLLS = 3000  # of libgomp's waiting threads before they sleep, 0.03 to 0.05 us each
API_KEY, ADMIN_API_KEY = "API_KEY", "ADMIN_API_KEY"  # after the prefix
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # who may write a file
KEY_NAMES = tuple(f"{PREFIX}_{name}" for name in (API_KEY, ADMIN_API_KEY))


def child_environment(settings: Settings, role: str) -> dict[str, str]:
    """The environment of a child process. The user's own thread variables take precedence.

    OpenMP's threads poll for a tenth of a millisecond, which is about as long as the worker pauses between two of their
    loops, and then sleep. Always sleeping takes up to 0.4 ms a loop to wake them; polling for longer takes cores from
    others, who make such threads wait in turn. Measuring either on a machine that is busy at that time is wrong later.

    Of torch's two BLAS interfaces, cuBLASLt chooses faster tiles for long rows of W at 256 rows of x, and nearly the
    same tiles elsewhere (benchmarks/results/choosing/wide_h200.txt, F). float32 keeps the interface it was tested with.
    """
    is_worker = rank_of(role) is not None
    threads = settings.num_threads if is_worker else 1
    polls = POLLS if threads > 1 else 0
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(polls), "KMP_BLOCKTIME": str(min(polls, 1))}
    return {
        **({"TORCH_BLAS_PREFER_CUBLASLT": "1"} if is_worker and settings.model.dtype != "float32" else {}),
        **({} if _sets_thread_waiting() else waiting),  # all of them or none, because they override each other
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **isolated_environment(),
        **(NO_MULTICAST if is_worker and settings.ranks > 1 else {}),
        **_kept_bytecode(),
        "PYTHONUNBUFFERED": "1",
    }


def refuse_multicast() -> None:
    """Have libraries of this process leave NVLink multicast off: reductions are plain loads and stores."""
    os.environ.update(NO_MULTICAST)


def isolated_environment() -> dict[str, str]:
    """The environment of a process that works on what clients send: API keys are not in it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(KEY_NAMES)}
    return {**own, "TOKENIZERS_PARALLELISM": "false"}


def _kept_bytecode() -> dict[str, str]:
    """Where an image lets Python keep no bytecode, and has none of torch, it is kept with other files of the engine.

    Otherwise each process compiles a thousand modules, of torch and others, at each start, for seconds.
    """
    torch = importlib.util.find_spec("torch") if sys.dont_write_bytecode and sys.pycache_prefix is None else None
    if torch is None or torch.cached is None or os.path.exists(torch.cached):
        return {}
    folder = os.path.join(cache_directory(), "bytecode")
    is_own = _only_own(folder) and _only_own(cache_directory())
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder} if is_own else {}


def _only_own(folder: str) -> bool:
    """Whether no other user can write into a folder, which is made if it is missing: what lies there is run."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid in (0, os.geteuid()) and not facts.st_mode & BY_OTHERS


def _sets_thread_waiting() -> bool:
    """True if the user has set how OpenMP's threads wait for work."""
    return any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"))


def waiting_fact() -> str:
    """How this process's OpenMP threads wait, for reports."""
    set_to = (f"{name}={os.environ[name]}" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ)
    return " ".join(set_to) or "as OpenMP likes"


def asked_threads() -> int | None:
    """The number of threads in OMP_NUM_THREADS; None without one."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def asked_key(name: str) -> str | None:
    """A key in the environment; None without one."""
    return os.environ.get(f"{PREFIX}_{name}") or None


def own_environment() -> dict[str, str]:
    """The environment of this process, for a process that is not the engine's."""
    return dict(os.environ)


def asks_for_spec_v2() -> bool:
    """True if SGLANG_ENABLE_SPEC_V2 is set. Overlap is always on in this engine; a log line reports it."""
    return "SGLANG_ENABLE_SPEC_V2" in os.environ


def asked_otlp_protocol() -> str | None:
    """The protocol that OpenTelemetry's own variables ask for; None without them."""
    names = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def forces_greedy_verify() -> bool:
    """True if SGLANG_NGRAM_FORCE_GREEDY_VERIFY is switched on, in one of SGLang's spellings."""
    return os.environ.get(FORCE_GREEDY_NGRAM, "").lower() in ("1", "true", "yes", "y", "on", "t")


def kernel_cache() -> str:
    """Where Triton keeps what it has compiled, for a process that has not imported it."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")


def cache_directory() -> str:
    """Where downloaded default weights live."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("OVERLAP_SPEC_CACHE") or os.path.join(base, "overlap-spec")
