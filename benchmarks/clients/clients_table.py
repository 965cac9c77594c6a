"""Which clients are run, and how."""

from dataclasses import dataclass
from pathlib import Path

MODEL = "smollm2"
OPENAI_SDIST = "openai==3.52.0"
SGLANG_WHEEL = "sglang==0.5.23"


@dataclass(frozen=True)
class Place:
    """Where a run happens: a working directory, a server and its tokenizer."""

    work: Path
    url: str
    tokenizer: Path

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
    """A benchmark's own command. `arguments` name the `values` of a `Place` in braces."""

    environment: str
    program: str
    packages: tuple[str, ...]
    arguments: tuple[str, ...]


CHECKS = {
    "openai": Checks("sdk", "openai_sdk.py"),
    "anthropic": Checks("sdk", "anthropic_sdk.py"),
    "langchain": Checks("langchain", "langchain_sdk.py"),
    "instructor": Checks("instructor", "instructor_sdk.py"),
}
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
    ),
}
