"""Collects the accept lengths that the long tests found with trained drafts into one report.

    python -m pytest -m full tests/integration -k "accept_length or prompt_lookup" --heads DIR --summaries FILE
    python benchmarks/accept_lengths.py FILE --output benchmarks/results/accept_lengths_cpu.json
    python benchmarks/accept_lengths.py FILE --lookup --output benchmarks/results/prompt_lookup_cpu.json

SmolLM2 in float32 on a CPU, greedy: 20 chats of 64 tokens; for n-grams, 20 prompts with a text to copy. The tests
compare every run with a reference loop. With --lookup: n-grams beside transformers' prompt lookup, both in tokens per
forward, which needs only `-k prompt_lookup` and no heads.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from overlap_spec.bench.report import write_report

CHATS, COPIES = "chat20", "copy20"
ROWS = (  # summary, figure in it, method, (steps, topk, draft tokens), prompts
    ("smollm2_chain3_cpu", "accept_length", "EAGLE-3", "(3, 1, 4)", CHATS),
    ("smollm2_eagle3_tree_4_3_10_cpu", "accept_length", "EAGLE-3", "(4, 3, 10)", CHATS),
    ("smollm2_eagle_chain3_cpu", "accept_length", "EAGLE", "(3, 1, 4)", CHATS),
    ("smollm2_eagle_chain3_mapped_cpu", "accept_length", "EAGLE with an FR-Spec map", "(3, 1, 4)", CHATS),
    ("smollm2_eagle2_tree_4_3_10_cpu", "accept_length", "EAGLE", "(4, 3, 10)", CHATS),
    ("smollm2_mtp_chain3_cpu", "accept_length", "MTP", "(3, 1, 4)", CHATS),
    ("smollm2_mtp_tree_4_3_10_cpu", "accept_length", "MTP", "(4, 3, 10)", CHATS),
    ("smollm2_standalone3_cpu", "accept_length", "STANDALONE", "(3, 1, 4)", CHATS),
    ("smollm2_standalone_tree_4_3_10_cpu", "accept_length", "STANDALONE", "(4, 3, 10)", CHATS),
    ("ngram_and_prompt_lookup", "ngram", "NGRAM", "12 draft tokens", COPIES),
)
COMMAND = 'python -m pytest -m full tests/integration -k "accept_length or prompt_lookup" --heads DIR --summaries FILE'
LOOKUP = "ngram_and_prompt_lookup"  # the summary
LOOKUP_ROWS = (  # figure in it, method, guesses of a forward
    ("ngram_per_forward", "NGRAM", "trees of 11"),
    ("prompt_lookup", "transformers' prompt lookup", "chains of 10"),
)
LOOKUP_COMMAND = "python -m pytest -m full tests/integration -k prompt_lookup --summaries FILE"

Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summaries")
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    found = json.loads(Path(arguments.summaries).read_text())
    commits = {found[name]["run"]["commit"] for name, *_ in ROWS} if not arguments.lookup else set()
    if len(commits) > 1:
        parser.error(f"the summaries are of several commits: {', '.join(sorted(commits))}")
    write_report(arguments.output, lookup_report(found) if arguments.lookup else lengths_report(found))


def lengths_report(found: Json) -> Json:
    """Accept lengths of every method."""
    figures: list[Json] = [
        {"method": method, "numbers": numbers, "prompts": prompts, "accept_length": found[name]["figures"][figure]}
        for name, figure, method, numbers, prompts in ROWS
    ]
    run = found[ROWS[0][0]]["run"] | {"command": COMMAND}
    return {"benchmark": "accept_lengths", "run": run, "figures": figures}


def lookup_report(found: Json) -> Json:
    """N-grams and prompt lookup, counted alike."""
    measured = found[LOOKUP]["figures"]
    figures: list[Json] = [
        {"method": method, "guesses": guesses, "tokens_per_forward": measured[figure]}
        for figure, method, guesses in LOOKUP_ROWS
    ]
    run = found[LOOKUP]["run"] | {"command": LOOKUP_COMMAND}
    return {"benchmark": "prompt_lookup", "run": run, "figures": figures}


if __name__ == "__main__":
    main()
