"""Figures of a run: what its users saw.

first token      from sending a request to its first tokens
time per token   (last - first) / (tokens - 1): what a long answer costs a token
gap              between two arrivals of tokens of one answer; an arrival may have several tokens

Percentiles are numpy's, with linear interpolation. Requests that failed count as errors alone; of those that were cut
off at the end of the run, what came counts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_spec.bench.traffic.arrivals import ALONE, LONG, STREAM
from overlap_spec.bench.traffic.processes import Outcome, Played
from overlap_spec.bench.traffic.rate_search import Limits

BUSY_CLIENT = 0.7  # of a processor, from which on a client may be what is measured
SHARES = (50, 90, 99)

Json = dict[str, Any]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Answered:
    """An answer's times in milliseconds, of one that was cut off as far as it came. `per_token`: None for one token."""

    outcome: Outcome
    first_token: float
    per_token: float | None
    gaps: Times

    @property
    def longest_gap(self) -> float:
        return float(self.gaps.max()) if len(self.gaps) else 0.0


def answered(outcomes: Iterable[Outcome]) -> list[Answered]:
    """Those that got tokens and did not fail."""
    found = []
    for outcome in outcomes:
        times = 1000 * np.frombuffer(outcome.times)
        if len(times) and not (outcome.error and not outcome.stopped):
            per_token = float(times[-1] - times[0]) / (outcome.tokens - 1) if outcome.tokens > 1 else None
            found.append(Answered(outcome, float(times[0]) - 1000 * outcome.sent_at, per_token, np.diff(times)))
    return found


def figures_of(played: Played, limits: Limits) -> Json:
    """All figures of a run; those of each tag under `by_tag`."""
    outcomes = played.outcomes
    tags = sorted({outcome.tag for outcome in outcomes} - {""})
    figures = _figures(outcomes, limits) | {
        "planned": played.planned,
        "stopped_because": played.stopped_because,
        "client": _client(played),
    }
    if tags:
        by_tag = {tag: _figures([each for each in outcomes if each.tag == tag], limits) for tag in tags}
        figures["by_tag"] = by_tag
    if {ALONE, STREAM, LONG} <= set(tags):
        figures["interruption"] = interruption(outcomes)
    return figures


def interruption(outcomes: Sequence[Outcome]) -> Json:
    """What a long prompt does to streams, and they to it. Times in ms; gaps that ended after the prompt was sent."""
    by_tag = {tag: [each for each in answered(outcomes) if each.outcome.tag == tag] for tag in (ALONE, STREAM, LONG)}
    if not by_tag[ALONE] or not by_tag[LONG]:
        return {}
    alone, among = by_tag[ALONE][0].first_token, by_tag[LONG][0].first_token
    sent = by_tag[LONG][0].outcome.sent_at
    before, after, ended_early = 0.0, 0.0, 0
    for stream in by_tag[STREAM]:
        times = np.frombuffer(stream.outcome.times)
        late = times[1:] >= sent
        before = max(before, float(stream.gaps[~late].max(initial=0.0)))
        after = max(after, float(stream.gaps[late].max(initial=0.0)))
        ended_early += bool(times[-1] < sent + among / 1000)
    return {
        "longest_gap_ms": round(after, 3),
        "longest_gap_before_ms": round(before, 3),
        "first_token_alone_ms": round(alone, 3),
        "first_token_among_streams_ms": round(among, 3),
        "first_token_ratio": round(among / alone, 3),
        "num_streams": len(by_tag[STREAM]),
        "streams_that_ended_before": ended_early,
    }


def _figures(outcomes: Sequence[Outcome], limits: Limits) -> Json:
    good = answered(outcomes)
    whole = [each for each in good if not each.outcome.stopped]
    wall = _wall(outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    met = sum(each.first_token <= limits.first_token_ms and (each.per_token or 0.0) <= limits.tpot_ms for each in whole)
    return {
        "sent": len(outcomes),
        "answered": len(whole),
        "cut_off": sum(outcome.stopped for outcome in outcomes),
        "errors": _errors(outcomes),
        "seconds": round(wall, 3),
        "prompt_tokens": sum(outcome.prompt_len for outcome in outcomes),
        "tokens": tokens,
        "requests_per_second": round(len(whole) / wall, 3) if wall else 0.0,
        "tokens_per_second": round(tokens / wall, 1) if wall else 0.0,
        "goodput": round(met / wall, 3) if wall else 0.0,
        "first_token_ms": _spread([each.first_token for each in good]),
        "time_per_token_ms": _spread([each.per_token for each in good if each.per_token is not None]),
        "gap_ms": _spread(np.concatenate([each.gaps for each in good]) if good else []),
        "longest_gap_ms": _spread([each.longest_gap for each in good if len(each.gaps)]),
        "counted_by": dict(Counter(each.outcome.counted_by for each in whole)),
    }


def _wall(outcomes: Sequence[Outcome]) -> float:
    """Seconds from the first request to the last token."""
    last = max((np.frombuffer(outcome.times)[-1] for outcome in outcomes if outcome.times), default=0.0)
    return float(last) - min(outcome.sent_at for outcome in outcomes) if last else 0.0


def _errors(outcomes: Sequence[Outcome]) -> Json:
    """How many of each kind, and what the server wrote in the first of them."""
    failed = [outcome for outcome in outcomes if outcome.error and not outcome.stopped]
    first = {outcome.error: outcome.detail for outcome in reversed(failed)}
    counts = Counter(outcome.error for outcome in failed)
    return {kind: {"count": count, "first": first[kind]} for kind, count in counts.items()}


def _client(played: Played) -> Json:
    """Whether the clients kept up: the busiest one's share of a processor, and how late requests were sent."""
    late = [1000 * (outcome.sent_at - outcome.due_at) for outcome in played.outcomes]
    busiest = max(played.cpu_shares, default=0.0)
    return {
        "processes": len(played.cpu_shares),
        "cpu_shares": [round(share, 3) for share in played.cpu_shares],
        "may_be_the_bottleneck": busiest > BUSY_CLIENT,
        "sent_late_ms": _spread(late),
    }


def _spread(values: Sequence[float] | Times) -> dict[str, float]:
    """Percentiles and the largest; empty without values."""
    if not len(values):
        return {}
    found = np.percentile(np.asarray(values), (*SHARES, 100))
    return dict(
        zip((*(f"p{share}" for share in SHARES), "max"), (round(float(each), 3) for each in found), strict=True)
    )
