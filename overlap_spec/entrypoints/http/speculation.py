"""Speculation as bodies ask for it, and as replies report it.

A reply reports what was asked for: a `provenance` entry for each token, and counts of its verify steps in the shape of
vLLM (`metrics.speculative_decoding`) and of SGLang (`sglext.spec_tokens_details`; in `/generate`, `meta_info`).
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from overlap_spec.entrypoints.http.body_fields import Json
from overlap_spec.messages import MetricsLevel, Origin, Speculative, Usage, Verified


def asked_speculation(asked: Speculative, returns_details: bool) -> Speculative:
    """What the engine is asked for; `returns_details` is SGLang's `return_spec_tokens_details`."""
    if returns_details and asked.metrics is MetricsLevel.NONE:
        return replace(asked, metrics=MetricsLevel.SUMMARY)
    return asked


class TokenOrigin(msgspec.Struct, frozen=True):
    """Where one token came from, and in which step of the engine."""

    origin: Origin
    step: int


Provenance = list[TokenOrigin]


class SpeculationReport:
    """What the steps of one answer verified, as far as it was asked for."""

    def __init__(self, asked: Speculative) -> None:
        self._asked = asked
        self._steps: list[Verified] = []
        self._provenance: Provenance = []

    def add(self, verified: Verified | None, num_tokens: int) -> Provenance | UnsetType:
        """Take in a step that added so many tokens. Returns their provenance, if the reply shows it."""
        if verified is None:
            return [] if self._asked.provenance else UNSET
        self._steps.append(verified)
        if not self._asked.provenance:
            return UNSET
        added = [TokenOrigin(verified.origin(index), verified.step_id) for index in range(num_tokens)]
        self._provenance += added
        return added

    @property
    def provenance(self) -> Provenance | UnsetType:
        """Where each token of the answer came from, if the reply shows it."""
        return self._provenance if self._asked.provenance else UNSET

    @property
    def has_metrics(self) -> bool:
        """Whether the reply shows counts."""
        return self._asked.metrics is not MetricsLevel.NONE

    def vllm_metrics(self, num_steps: int) -> Json:
        """vLLM's `speculative_decoding`. `num_steps`: the engine's."""
        steps = [step for step in self._steps if step.proposed]
        accepted, proposed = sum(step.accepted for step in steps), sum(step.proposed for step in steps)
        metrics = {
            "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1.0,
            "draft_acceptance_rate": accepted / proposed if proposed else 0.0,
            "acceptance_histogram": _histogram(steps, num_steps),
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": proposed,
            "num_spec_tokens": num_steps,
        }
        if self._asked.metrics is MetricsLevel.DETAILED:
            metrics["per_step_accepted"] = [step.accepted for step in steps]
            metrics["per_step_drafted"] = [step.proposed for step in steps]
        return metrics

    def sglang_details(self, usage: Usage, num_steps: int) -> Json:
        """SGLang's `spec_tokens_details`, of which `/generate` has the fields in `meta_info`."""
        steps = [step for step in self._steps if step.proposed]
        accepted, proposed = sum(step.accepted for step in steps), sum(step.proposed for step in steps)
        return {
            "spec_accept_rate": accepted / proposed if proposed else 0.0,
            "spec_accept_length": usage.completion_tokens / usage.spec_verify_ct if usage.spec_verify_ct else 0.0,
            "spec_num_correct_drafts": accepted,
            "spec_num_proposed_drafts": proposed,
            "spec_verify_ct": usage.spec_verify_ct,
            "spec_correct_drafts_histogram": _histogram(steps, num_steps),
        }


class ReportedCounts(msgspec.Struct, frozen=True):
    """The counts at the end of a reply: an object for one choice, a list for several."""

    metrics: Json
    sglext: Json


def reported_counts(
    reports: Sequence[SpeculationReport], usages: Sequence[Usage], num_steps: int
) -> ReportedCounts | None:
    """What the reply shows of its choices; None where it shows no counts."""
    if not reports[0].has_metrics:
        return None
    vllm = [report.vllm_metrics(num_steps) for report in reports]
    pairs = zip(reports, usages, strict=True)
    sglang = [report.sglang_details(usage, num_steps) for report, usage in pairs]
    one = len(reports) == 1
    return ReportedCounts(
        {"speculative_decoding": vllm[0] if one else vllm}, {"spec_tokens_details": sglang[0] if one else sglang}
    )


def _histogram(steps: Sequence[Verified], num_steps: int) -> list[int]:
    """How many steps accepted 0, 1, .. guesses."""
    counts = [0] * (num_steps + 1)
    for step in steps:
        counts[step.accepted] += 1
    return counts
