"""The environment: the only file that reads it, and what child processes are given."""

import os

from overlap_spec.config.settings import FORCE_GREEDY_NGRAM, Settings


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
    return os.environ.get(FORCE_GREEDY_NGRAM, "").lower() in ("1", "true", "yes", "y", "on", "t")


def cache_directory() -> str:
    """Where downloaded default weights live."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("OVERLAP_SPEC_CACHE") or os.path.join(base, "overlap-spec")
