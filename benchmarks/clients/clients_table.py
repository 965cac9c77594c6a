"""Which clients are run, and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from results_of import NUM_REQUESTS

MODEL = "smollm2"
OPENAI_SDIST = "openai==3.52.0"
SGLANG_WHEEL = "sglang==0.5.23"
VLLM_WHEEL = "vllm==0.33.0"
ENGINE_BENCH = ("aiohttp", "transformers")  # what the engines' benchmarks use most


@dataclass(frozen=True)
class Place:
    """Where a run happens: a working directory, a server, its tokenizer and its weights."""

    work: Path
    url: str
    tokenizer: Path
    weights: Path

    def values(self, out: Path) -> dict[str, str]:
        """What a command's arguments may name."""
        return {"url": self.url, "model": MODEL, "tokenizer": str(self.tokenizer), "out": str(out)}


@dataclass(frozen=True)
class Checks:
    """A script that uses an SDK."""

    environment: str
    script: str


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's own command. `arguments` name the `values` of a `Place` in braces.

    `wheel`: of an engine whose benchmark runs without it (`cases/engine_bench.py`); `program` is the engine then.
    `environ`: for its process. Some look on a hub for the model by its name, unless they are told not to.
    """

    environment: str
    program: str
    packages: tuple[str, ...]
    arguments: tuple[str, ...]
    wheel: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: {"HF_HUB_OFFLINE": "1"})


CHECKS = {
    "openai": Checks("sdk", "openai_sdk.py"),
    "anthropic": Checks("sdk", "anthropic_sdk.py"),
    "langchain": Checks("langchain", "langchain_sdk.py"),
    "instructor": Checks("instructor", "instructor_sdk.py"),
    "lm_eval": Checks("lm_eval", "lm_eval_tasks.py"),
}


def sglang_bench(backend: str) -> Benchmark:
    """SGLang's benchmark of a server, through one of the APIs that it knows."""
    arguments = (
        *("--backend", backend, "--base-url", "{url}", "--model", "{model}", "--tokenizer", "{tokenizer}"),
        *("--dataset-name", "random-ids", "--random-input-len", "24", "--random-output-len", "8"),
        *("--random-range-ratio", "1", "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "2", "--flush-cache"),
        *("--output-file", "{out}/report.jsonl", "--disable-tqdm"),
    )
    return Benchmark("engine_bench", "sglang", ENGINE_BENCH, arguments, SGLANG_WHEEL)


def vllm_bench(backend: str, endpoint: str) -> Benchmark:
    """vLLM's benchmark of a server, through one of the APIs that it knows."""
    arguments = (
        *("--backend", backend, "--endpoint", endpoint, "--base-url", "{url}", "--model", "{model}"),
        *("--tokenizer", "{tokenizer}", "--dataset-name", "random", "--random-input-len", "24"),
        *(
            "--random-output-len",
            "8",
            "--num-prompts",
            str(NUM_REQUESTS),
            "--max-concurrency",
            "2",
            "--temperature",
            "0",
        ),
        *("--save-result", "--result-dir", "{out}", "--result-filename", "report.json", "--disable-tqdm"),
    )
    return Benchmark("engine_bench", "vllm", ENGINE_BENCH, arguments, VLLM_WHEEL)


BENCHMARKS = {
    "guidellm": Benchmark(
        *("guidellm", "guidellm", ("guidellm",)),
        (
            *("run", "--backend", "kind=openai_http,target={url},model={model}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
            *("--tokenizer", "kind=hf_auto,model={tokenizer}"),
            *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"),
            *("--output", "kind=json,path={out}/report.json", "--disable-console-interactive"),
        ),
    ),
    "evalscope": Benchmark(
        *("evalscope", "evalscope", ("evalscope",)),
        (
            *("perf", "--url", "{url}/v1/chat/completions", "--api", "openai", "--model", "{model}", "--stream"),
            *("--tokenizer-path", "{tokenizer}", "--dataset", "random", "--prefix-length", "0"),
            *("--min-prompt-length", "40", "--max-prompt-length", "48", "--min-tokens", "8", "--max-tokens", "8"),
            *("--number", "6", "--parallel", "2", "--outputs-dir", "{out}", "--no-timestamp"),
        ),
    ),
    "aiperf": Benchmark(
        *("aiperf", "aiperf", ("aiperf",)),
        (
            *("profile", "--model", "{model}", "--url", "{url}", "--endpoint-type", "chat", "--streaming"),
            *("--concurrency", "2", "--request-count", "6", "--isl", "24", "--osl", "8"),
            *("--tokenizer", "{tokenizer}", "--artifact-dir", "{out}", "--ui", "none"),
        ),
        environ={},  # with HF_HUB_OFFLINE it takes no path of a tokenizer
    ),
    "sglang_bench": sglang_bench("sglang"),
    "sglang_bench_completions": sglang_bench("sglang-oai"),
    "sglang_bench_chat": sglang_bench("sglang-oai-chat"),
    "vllm_bench": vllm_bench("openai", "/v1/completions"),
    "vllm_bench_chat": vllm_bench("openai-chat", "/v1/chat/completions"),
}
SERVER_FLAGS = {"openai_sdist": ("--context-length", "128")}  # its tests ask for chats of any length
WHAT = {  # it does
    "openai": "chats, completions and responses: streams, tools, schemas, log-probs",
    "anthropic": "messages: streams, tools, schemas, counts, errors",
    "langchain": "invoke, stream, structured output, bound tools, responses",
    "instructor": "validated objects, in three of its modes",
    "lm_eval": "a loglikelihood and a generate task of this repository's LICENSE; numbers are transformers'",
    "guidellm": "a benchmark of chats",
    "evalscope": "a benchmark of chats",
    "aiperf": "a benchmark of chats",
    "sglang_bench": "SGLang's benchmark, through /generate",
    "sglang_bench_completions": "the same benchmark, through /v1/completions",
    "sglang_bench_chat": "the same benchmark, through /v1/chat/completions",
    "vllm_bench": "vLLM's benchmark, through /v1/completions",
    "vllm_bench_chat": "the same benchmark, through /v1/chat/completions",
    "openai_sdist": "openai-python's own tests of chats, completions and models",
    "sglang_kits": "SGLang's server test kits that need nothing of sglang",
}
