"""Where greedy decoding in bfloat16 leaves plain decoding, and whether rounding explains it: SmolLM2, 40 prompts.

    python benchmarks/bf16_divergences.py --output benchmarks/results/bf16_divergences_h200.json
    python benchmarks/bf16_divergences.py --judge benchmarks/results/bf16_divergences_h200.json

The reference is plain decoding at batch 1. Plain decoding and EAGLE-3 (3, 1, 4) in larger batches compute the same rows
in other shapes, whose sums are rounded differently, so a near-tie may have another argmax. The script measures this
noise: forwards of 1 to 128 rows compute every reference answer again from its tokens, each with its own KV.

A divergence's margin is the reference's largest logit minus that of the other answer's token, at the first position
where the answers differ. `bf16_criterion.py` decides whether margins or the number of divergences exceed rounding; the
exit status is then 1. `--judge` writes its verdict into an existing report, and measures nothing.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _tests_path import ROOT
from bf16_criterion import judge
from support.answer_reader import AnswerReader
from support.solo import Solo
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import EngineConfig
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams

NUM_TOKENS = 64
MOST_BATCH = 32
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, seed=0)
NONE = {"speculative_algorithm": "NONE"}
CHAIN = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
# Requests and rows of each: the first is the reference's, the last what EAGLE-3 verifies at batch 32.
SHAPES = ((1, 1), (1, 4), (8, 1), (32, 1), (16, 4), (32, 4))


@dataclass(frozen=True)
class Divergence:
    """Where an answer first differs from the reference."""

    method: str
    batch: int
    prompt: int
    position: int
    reference_token: int
    token: int
    margin: float  # logits of the two, in the reference's shape
    top2_margin: float  # its two largest logits


def noise_between_shapes(
    reader: AnswerReader, prompts: list[list[int]], answers: list[list[int]], reference: Tensor
) -> Any:
    """How far logits of the same rows lie apart, over all of the vocabulary and over the reference's two best."""
    leading = reference.topk(2).indices
    figures = []
    for batch, width in SHAPES[1:]:
        apart = (reader.logits(prompts, answers, batch, width) - reference).abs()
        two = apart.gather(1, leading)
        figures.append(
            {
                "rows": batch * width,
                "requests": batch,
                "max": float(apart.max()),
                "p99": percentile(apart, 0.99),
                "median": percentile(apart, 0.5),
                "leading_two_max": float(two.max()),
                "leading_two_p99": percentile(two, 0.99),
            }
        )
        print(figures[-1], flush=True)
    most = {name: max(figure[name] for figure in figures) for name in ("max", "leading_two_max")}
    return {"compared_with_rows": 1, "places": len(reference), "shapes": figures} | most


def percentile(values: Tensor, share: float) -> float:
    """Of more values than torch.quantile takes."""
    flat = values.flatten()
    return float(flat.kthvalue(max(1, int(share * flat.numel()))).values)


def divergences_of(
    method: str, batch: int, answers: list[list[int]], references: list[list[int]], logits: list[Tensor]
) -> list[Divergence]:
    """At most one for each prompt: after it the prefixes differ."""
    found = []
    for prompt, (answer, reference, rows) in enumerate(zip(answers, references, logits, strict=True)):
        differing = (i for i, (a, b) in enumerate(zip(answer, reference, strict=False)) if a != b)
        place = next(differing, None)
        if place is None:
            assert len(answer) == len(reference), f"prompt {prompt}: equal tokens, another length"
            continue
        row, ours, theirs = rows[place], answer[place], reference[place]
        two = row.topk(2).values
        margins = round(float(row[theirs] - row[ours]), 5), round(float(two[0] - two[1]), 5)
        found.append(Divergence(method, batch, prompt, place, theirs, ours, *margins))
    return found


def tokens_of(solo: Solo, prompts: list[list[int]], batch: int) -> list[list[int]]:
    return [answer.tokens for answer in solo.answers(prompts, GREEDY, together=batch)]


def main() -> int:
    parser = argparse.ArgumentParser()
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output")
    what.add_argument("--judge")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=40)
    arguments = parser.parse_args()
    path = arguments.output or arguments.judge
    report = measure(arguments) if arguments.output else json.loads(Path(path).read_text())
    report["verdict"] = judge(report)
    write_report(path, report)
    print(json.dumps(report["verdict"], indent=1))
    return 0 if report["verdict"]["passed"] else 1


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything but the verdict."""
    files, on_cuda = resolve_model(EngineConfig()), arguments.device == "cuda"
    data = json.loads((ROOT / "tests/data/greedy64.json").read_text())["rows"]
    prompts = [row["prompt_ids"] for row in data[: arguments.prompts]]
    flags: dict[str, Any] = {"device": arguments.device, "dtype": arguments.dtype, "depth": 2, "graphs": on_cuda}
    answers: dict[tuple[str, int], list[list[int]]] = {}
    for method, chosen in (("plain", NONE), ("eagle3", CHAIN)):
        solo = Solo(files, batch=MOST_BATCH, **flags, **chosen)
        for batch in (1, 8, MOST_BATCH):
            answers[method, batch] = tokens_of(solo, prompts, batch)
        solo.close()
    references = answers.pop(("plain", 1))
    reader = AnswerReader(files, arguments.device, arguments.dtype, MOST_BATCH)
    reference = reader.logits(prompts, references, *SHAPES[0])
    lengths = [len(tokens) for tokens in references]
    read_again = reference.argmax(1).tolist()
    expected = [token for tokens in references for token in tokens]
    unlike = sum(a != b for a, b in zip(read_again, expected, strict=True))
    noise = noise_between_shapes(reader, prompts, references, reference)
    rows = list(reference.split(lengths))
    found = [
        d for (name, batch), given in answers.items() for d in divergences_of(name, batch, given, references, rows)
    ]
    device = torch.cuda.get_device_name() if on_cuda else arguments.device
    run = describe_run(device, torch.get_num_threads())
    return {
        "benchmark": "bf16_divergences",
        "run": run,
        "dtype": arguments.dtype,
        "prompts": len(prompts),
        "tokens": NUM_TOKENS,
        "reference_tokens_not_its_own_argmax": unlike,
        "noise": noise,
        "answers": [
            {"method": name, "batch": batch, "divergences": sum((d.method, d.batch) == (name, batch) for d in found)}
            for name, batch in answers
        ],
        "divergences": [asdict(divergence) for divergence in found],
    }


if __name__ == "__main__":
    sys.exit(main())
