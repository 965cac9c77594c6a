"""The tables of a methods report: every figure, or a line for each method."""

from typing import Any

Report = dict[str, Any]
Rows = list[list[Any]]

BUSY = 2.0  # load average relative to that of one engine: above it, other processes used the machine

FULL = [
    "method",
    "prompts",
    "batch",
    "accept length",
    "step, ms",
    "tok/s",
    "against plain",
    "same answers",
    "weights, MiB",
    "KV, bytes a token",
]


def full_rows(report: Report) -> Rows:
    """One row for each method, set of prompts and batch size."""
    return [
        [
            name_of(entry),
            figures["prompts"],
            figures["batch"],
            figures["accept_length"],
            figures["step_ms"],
            figures["tokens_per_second"],
            against_plain(figures["ratio"]),
            f"{figures['identical']:.0%}",
            *memory_of(entry),
        ]
        for entry in report["methods"]
        for figures in _in_order(entry, report)
    ]


def _in_order(entry: Report, report: Report) -> list[Report]:
    """An entry's rows by prompts, then by batch size. A method that learns is measured in another order."""
    names = report["workload"]["prompts"].split(",")
    return sorted(entry.get("figures", []), key=lambda row: (names.index(row["prompts"]), row["batch"]))


def summary_head(report: Report) -> list[str]:
    """The columns of `summary_rows`: of each set of prompts the accept length, and a ratio for every batch size."""
    of_prompts = ["accept length", *(f"batch {size}" for size in report["workload"]["batch_sizes"])]
    names = report["workload"]["prompts"].split(",")
    return ["method", *(f"{name}: {column}" for name in names for column in of_prompts), "same answers", *FULL[-2:]]


def summary_rows(report: Report) -> Rows:
    """One row for each method; a batch size's column has the ratio of tok/s to plain's."""
    return [_summary(entry, report) for entry in report["methods"] if entry.get("figures")]


def _summary(entry: Report, report: Report) -> list[Any]:
    """One row. Accept length is that of the smallest batch; answers that differ are those of any batch."""
    found = {(row["prompts"], row["batch"]): row for row in entry["figures"]}
    cells: list[Any] = []
    for name in report["workload"]["prompts"].split(","):
        rows = [found.get((name, size)) for size in report["workload"]["batch_sizes"]]
        cells.append(next((row["accept_length"] for row in rows if row), ""))
        cells += [against_plain(row["ratio"]) if row else "" for row in rows]
    same = min(row["identical"] for row in found.values())
    return [name_of(entry), *cells, f"{same:.0%}", *memory_of(entry)]


def notes(report: Report) -> list[str]:
    """A sentence for each method that was not measured, or not to its end, and one if others used the machine."""
    sentences = [
        f"{name_of(entry)}: {entry['status']}: {entry['reason']}"
        for entry in report["methods"]
        if entry["status"] != "ran"
    ]
    load, threads = max(entry["load_average"] for entry in report["methods"]), report["run"]["num_threads"]
    if load > BUSY * threads:
        sentences.append(
            f"others used this machine meanwhile (load average {load}, {threads} threads): times say little"
        )
    return sentences


def name_of(entry: Report) -> str:
    """A method with its numbers, as far as they are known."""
    flags = entry["flags"]
    numbers = [flags[name] for name in ("num_steps", "topk", "num_draft_tokens")]
    return f"{entry['label']} ({', '.join(map(str, numbers))})" if None not in numbers else str(entry["label"])


def against_plain(ratio: float) -> str:
    """The ratio to plain decoding's tok/s, marked if it is below 1."""
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}** slower"


def memory_of(entry: Report) -> list[str]:
    """Target's and draft's weights in MiB, and bytes per token in their KV caches."""
    memory = entry["memory"]
    return [
        _split(memory["weights_mib"], memory["draft_weights_mib"]),
        _split(memory["kv_bytes_per_token"], memory["draft_kv_bytes_per_token"]),
    ]


def _split(both: int, draft: int) -> str:
    return f"{both - draft} + {draft}" if draft else str(both)
