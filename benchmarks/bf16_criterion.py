"""Whether rounding explains where bfloat16 answers leave plain decoding: the two conditions of `bf16_divergences.py`.

Of margins: none may lie above what rounding does to a margin. The noise of one logit is measured (the largest of the
99th percentiles over batch shapes, on a row's two leading tokens); a margin is the difference of two, whose noise is
sqrt(2) times that if they are independent. A wrong token is caught by this wherever the margin is larger.

Of rates: speculation must not diverge on more prompts than plain decoding in a batch of the same size does, up to
chance. Fisher's exact test, one-sided, of each batch size, at 1% for all of them together. It catches what margins
cannot: many wrong tokens, all at near-ties.
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
