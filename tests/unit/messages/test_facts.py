"""Facts of the actors: each role's struct survives the link, and its report keeps the names of JSON reports."""

import msgspec
import pytest
from msgspec.structs import replace
from support.fake_facts import FRONTEND, MIB, SCHEDULER, WORKER, fake_facts

from overlap_spec.messages import (
    ActorFacts,
    ActorReady,
    CudaFacts,
    MemorySaving,
    ToSupervisor,
    WorkerFacts,
)

CUDA = CudaFacts(
    held_bytes={"of target weights": 1000 * MIB, "of CUDA graphs": 50 * MIB},
    kv_bytes=5120,
    other_bytes=4,
    savings=(MemorySaving("--dtype bfloat16", 9 * MIB, 16), MemorySaving("--max-running-requests 4", 2 * MIB, 0)),
)


def on_cuda() -> WorkerFacts:
    graphs = {"graph_counts": {"layers": 3, "judge": 9}, "graph_s": {"first runs": 3.0, "layers": 2.0, "judge": 1.04}}
    start = {"imports": 7.0, "CUDA graphs": 3.04}
    return replace(WORKER, device="a GPU", platform=CUDA, start_s=start, graph_batch_sizes=(1, 2, 8), **graphs)


@pytest.mark.parametrize("facts", [FRONTEND, SCHEDULER, WORKER, on_cuda()])
def test_facts_of_every_role_survive_the_link(facts: ActorFacts) -> None:
    ready = ActorReady("a role", facts)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=ToSupervisor)
    assert decoded == ready and type(decoded.facts) is type(facts)


def test_a_report_of_a_cpu_engine() -> None:
    report = fake_facts().report()
    assert list(report) == ["frontend", "scheduler", "worker"]
    assert report["frontend"] == {"tokenizer": "none: token ids only", "client_endpoint": "ipc:///x"}
    assert report["scheduler"] == {
        "max_total_tokens": 28,
        "max_running_requests": 4,
        "context_length": 64,
        "chunked_prefill_size": 64,
        "steps_in_flight": 2,
        "prefix_cache": "bigram keys",
    }
    assert report["worker"] == {
        "device": "cpu",
        "tokens": 28,
        "pages": 7,
        "page_size": 4,
        "slots": 4,
        "chunk_tokens": 64,
        "processor": "a processor, 2 cores",
        "threads": "1, threads sleep",
        "linears": "as loaded",
        "graphs": "none",
        "step_widths": "1 4",
        "start_up": "1.2 s: imports 1.0, weights 0.2",
        "ceilings": "30 GB/s, FLOP/s not known",
        "verification": "none",
        "weight_format": "",
        "draft_weight_format": "",
        "acceptance": "real",
        "logit_processor": "none",
        "weights_mib": 513,
        "draft_weights_mib": 37,
        "kv_bytes_per_token": 512,
        "draft_kv_bytes_per_token": 64,
        "state_bytes_per_request": 0,
        "state_snapshots": 0,
        "bytes_per_state_snapshot": 0,
        "ranks": "one",
    }


def test_a_gpu_reports_graphs_memory_and_what_would_save_it() -> None:
    report = on_cuda().report()
    assert report["graphs"] == "12 for batches of 1 to 8 (3 sizes): 3 layers 2.0 s, 9 judge 1.0 s; first runs 3.0 s"
    assert report["start_up"] == "10.0 s: imports 7.0, CUDA graphs 3.0"
    assert report["memory"] == (
        "1000 MiB of target weights, 50 MiB of CUDA graphs; 5120 bytes of KV cache a token and 4 beside it"
    )
    assert report["to save memory"] == "--dtype bfloat16 (9 MiB and 16 bytes a token), --max-running-requests 4 (2 MiB)"
    assert "processor" not in report and replace(on_cuda(), flop_per_s=7.9e14).ceilings == "30 GB/s, 790 TFLOP/s"


@pytest.mark.parametrize(("num_tokens", "shown"), [(0, "off"), (1, "token keys"), (5, "keys of 5 tokens")])
def test_the_keys_of_the_prefix_cache(num_tokens: int, shown: str) -> None:
    assert replace(SCHEDULER, prefix_cache_keys=num_tokens).report()["prefix_cache"] == shown
