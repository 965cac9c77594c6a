"""The table that `serve` prints when it is ready, and a curl line that works."""

import json
import shlex

from rich.console import Console
from rich.table import Table

from overlap_spec.config import DUMMY, MIB, AttentionSettings, SamplingDefaults, Settings
from overlap_spec.entrypoints.parsers.formats import AUTO, call_format, reasoning_format
from overlap_spec.messages import CudaFacts, EngineFacts

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
QUEUE_ORDER = {"fcfs": "first come, first served", "lpm": "longest cached prefix first"}
PLAIN_WIDTH = 120  # columns where stdout is no terminal


def http_url(host: str, port: int) -> str:
    """The server's address, as seen from this machine."""
    address = ANY_ADDRESS.get(host, host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def start_table(settings: Settings, facts: EngineFacts, url: str, endpoint: str) -> Table:
    """Model, method, memory and endpoints: the settings, and what the worker has measured."""
    table = Table(show_header=False, title="overlap-spec")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        _settled(settings, facts) | _read(settings, facts) | _measured(facts) | _addresses(settings, url, endpoint)
    ).items():
        table.add_row(name, value)
    return table


def _addresses(settings: Settings, url: str, endpoint: str) -> dict[str, str]:
    page = {"in a browser": f"{url}/ui"} if settings.server.ui else {}
    return {"HTTP": url, **page, "ZMQ": endpoint}


def _settled(settings: Settings, facts: EngineFacts) -> dict[str, str]:
    spec, model, scheduler = settings.spec, settings.model, settings.scheduler
    counts = f" ({spec.num_steps}, {spec.topk}, {spec.width}): steps, topk, draft tokens"
    numbers = counts if spec.num_steps else ""
    rows = {"model": model.name + _made_up(model.files.load_format), "method": spec.method + numbers}
    if spec.draft_path is not None:
        rows["draft model"] = spec.draft_path + _made_up(spec.draft_load_format)
    if spec.token_map is not None:
        rows["token map"] = spec.token_map
    if spec.width > 1:
        rows["draft numbers"] = spec.numbers_from
        rows["verification"] = facts.worker.verification
    if attention := _attention(settings.attention):
        rows["attention"] = attention
    return rows | {
        "dtype, device": f"{model.dtype}, {model.device}",
        "steps in flight": f"{scheduler.depth}" + (" (overlapped)" if scheduler.depth > 1 else " (no overlap)"),
        "context": f"{model.max_len} tokens",
        "requests": f"at most {scheduler.max_running_requests} running, {QUEUE_ORDER[scheduler.schedule_policy]}",
        **_gap(scheduler.max_gap_s),
        "sampling defaults": _sampling(settings.server.sampling_defaults),
    }


def _sampling(defaults: SamplingDefaults) -> str:
    """What a request gets that does not say how tokens are drawn."""
    given = ", ".join(f"{name} {value:g}" for name, value in defaults.changes().items())
    return f"{given} (the model's; OpenAI's else)" if given else "OpenAI's"


def _read(settings: Settings, facts: EngineFacts) -> dict[str, str]:
    """What is read out of answers, and whether a flag or the chat template has decided that."""
    server, template = settings.server, facts.tokenizer.chat_template
    found = {
        "tool calls": (server.tool_call_parser, call_format(server.tool_call_parser, template)),
        "reasoning": (server.reasoning_parser, reasoning_format(server.reasoning_parser, template)),
    }
    by = {AUTO: " (by the chat template)"}
    return {what: (form.name if form else "not read") + by.get(name, "") for what, (name, form) in found.items()}


def _gap(max_gap_s: float | None) -> dict[str, str]:
    return {} if max_gap_s is None else {"chunks beside decoding": f"at most {max_gap_s * 1000:g} ms"}


def _made_up(load_format: str) -> str:
    return ", RANDOM WEIGHTS" if load_format == DUMMY else ""


def _attention(attention: AttentionSettings) -> str:
    """Choices that are not the fastest."""
    said = {
        "torch operations for the target": attention.target_torch,
        "torch operations for the draft": attention.draft_torch,
        "the kernel of prefill for windows": attention.prefill_kernel,
        f"the draft sees {attention.draft_window} keys": attention.draft_window is not None,
    }
    return ", ".join(words for words, holds in said.items() if holds)


def _measured(facts: EngineFacts) -> dict[str, str]:
    worker = facts.worker
    drafting = worker.draft_weight_bytes // MIB  # of NGRAM: its log
    rows = {
        "KV pages": f"{worker.num_pages} of {worker.page_size} tokens ({worker.num_tokens} tokens)",
        "prefix cache": facts.scheduler.prefix_cache,
        "prefill chunk": f"{worker.chunk_tokens} tokens",
        "CUDA graphs": worker.graphs,
        "step widths": " ".join(map(str, worker.step_widths)),
        "start-up": worker.start_up,
        "weights": f"{worker.weight_bytes // MIB} MiB" + (f", {drafting} of them for drafting" if drafting else ""),
        **({"weight format": worker.weight_format} if worker.weight_format else {}),
        **({"draft's weight format": worker.draft_weight_format} if worker.draft_weight_format else {}),
    }
    if isinstance(worker.platform, CudaFacts):
        rows |= {name: str(value) for name, value in worker.platform.report().items()}
    return rows


def curl_line(url: str, needs_key: bool, takes_text: bool) -> str:
    """A request to paste into a shell."""
    chat = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}
    of_ids = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}
    path, body = ("/v1/chat/completions", chat) if takes_text else ("/generate", of_ids)
    key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"


def print_start(settings: Settings, facts: EngineFacts, url: str, endpoint: str) -> None:
    """Print the table, the curl line (never wrapped) and `ready`."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(start_table(settings, facts, url, endpoint))
    print(curl_line(url, bool(settings.server.keys.names), not settings.skip_tokenizer_init))
    print("ready", flush=True)
