"""Decides whether rounding explains the divergences of bfloat16 answers: two conditions for `bf16_divergences.py`.

Margins: no divergence may have a margin beyond rounding. The noise of one logit is measured (the largest
of the 99th percentiles over batch shapes, on a row's two leading tokens). A margin is the difference of two logits, so
its noise is sqrt(2) times that if they are independent. This condition detects a wrong token with a larger margin.

Rates: speculation must not diverge on more prompts than plain decoding in a batch of the same size, up to chance. The
test is Fisher's exact test, one-sided, for each batch size, at 1% for all of them together. This condition detects many
wrong tokens that are all near-ties, which margins cannot.
"""

import json
import math
from pathlib import Path
from typing import Any

SIGNIFICANCE = 0.01
MARGINS = Path(__file__).parent.parent / "tests/data/greedy64.json"  # of greedy positions of the same prompts


def judge(report: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a report's divergences: `passed`, and what it rests on."""
    bound = margin_bound(report["noise"]["shapes"])
    margins = [divergence["margin"] for divergence in report["divergences"]]
    above = sum(margin > bound for margin in margins)
    rates = compare_rates(report["answers"], report["prompts"])
    return {
        "margin_bound": bound,
        "largest_margin": max(margins, default=0.0),
        "divergences_above_bound": above,
        "greedy_positions_above_bound": share_above(bound),
        "rates": rates,
        "passed": above == 0 and all(rate["p"] >= SIGNIFICANCE / len(rates) for rate in rates),
    }


def margin_bound(shapes: list[dict[str, Any]]) -> float:
    """In logits."""
    return math.sqrt(2) * max(float(shape["leading_two_p99"]) for shape in shapes)


def share_above(bound: float) -> float:
    """Of the greedy positions: where a wrong token could not be taken for rounding."""
    margins = [margin for row in json.loads(MARGINS.read_text())["rows"] for margin in row["margins"]]
    return sum(margin > bound for margin in margins) / len(margins)


def compare_rates(answers: list[dict[str, Any]], prompts: int) -> list[dict[str, Any]]:
    """Each speculative run against plain decoding in a batch as large, or in the smallest there is."""
    plain = {row["batch"]: row["divergences"] for row in answers if row["method"] == "plain"}
    rates = []
    runs = [row for row in answers if row["method"] != "plain"]
    for row in runs:
        beside = plain[row["batch"] if row["batch"] in plain else min(plain)]
        p = {count: fisher(count, beside, prompts) for count in range(prompts + 1)}
        fails = [count for count in p if p[count] < SIGNIFICANCE / len(runs)]
        found = {"diverging": row["divergences"], "plain": beside, "p": p[row["divergences"]]}
        rates.append({"method": row["method"], "batch": row["batch"], **found, "fails_from": min(fails, default=None)})
    return rates


def fisher(first: int, second: int, size: int) -> float:
    """Probability of `first` or more marked in one group of `size`, given how many are in both: hypergeometric tail."""
    marked = first + second
    ways = sum(math.comb(size, k) * math.comb(size, marked - k) for k in range(first, min(size, marked) + 1))
    return ways / math.comb(2 * size, marked)
