"""llama.cpp, as xllamacpp on PyPI brings it, answering prompts one after another, turn by turn.

It runs with a Python of its own, which has xllamacpp and need not have overlap-spec (`benchmarks/llama_cpp.py`):

    stdin    {"model": .., "prompts": [..], "num_tokens": .., "threads": ..}, then one empty line for each turn
    stdout   {"ready": ..}, then the figures of each turn, a line each
"""

import json
import sys
import time
from typing import Any

import xllamacpp


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 2048, 1, 0
    server = xllamacpp.Server(params)
    answer(server, "Hi", 8)
    say({"ready": xllamacpp.__version__, "system": xllamacpp.get_system_info()})
    for _ in sys.stdin:
        rows = [answer(server, prompt, asked["num_tokens"]) for prompt in asked["prompts"]]
        tokens, seconds = sum(row["num_tokens"] for row in rows), sum(row["seconds"] for row in rows)
        decoded = sum(row["decode_s"] for row in rows)
        say(
            {
                "num_tokens": tokens,
                "seconds": round(seconds, 4),
                "tokens_per_second": round(tokens / seconds, 2),
                "step_ms": round(1000 * decoded / max(tokens - len(rows), 1), 3),
            }
        )


def answer(server: Any, prompt: str, num_tokens: int) -> dict[str, float]:
    """Greedy, to the end of the turn, without a cache of earlier prompts."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "cache_prompt": False,
    }
    started = time.perf_counter()
    found = server.handle_chat_completions(body)
    seconds = time.perf_counter() - started
    reply = json.loads(found) if isinstance(found, str | bytes) else found
    return {
        "num_tokens": reply["usage"]["completion_tokens"],
        "seconds": seconds,
        "decode_s": reply["timings"]["predicted_ms"] / 1000,
    }


def say(figures: dict[str, Any]) -> None:
    """One line for the parent."""
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
