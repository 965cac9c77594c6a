"""Requests that limit their speculation, and what their answers must say of it."""

import random
from collections import Counter

from msgspec.structs import replace

from overlap_spec.messages import FinishKind, MetricsLevel, SamplingParams, Speculative
from support.ring_links import Answer


def limited(sampling: SamplingParams, num_steps: int) -> SamplingParams:
    """The same request with random speculation, of at most the engine's steps. Its tokens do not depend on it."""
    rng = random.Random(f"speculation {sampling.seed}")
    if rng.random() < 0.3:
        return sampling
    report = {"provenance": rng.random() < 0.5, "metrics": rng.choice(list(MetricsLevel))}
    asked = rng.choice([None, 0, rng.randint(0, num_steps), min(1, num_steps), num_steps])
    method = "none" if asked == 0 and rng.random() < 0.5 else ""
    return replace(sampling, speculative=Speculative(method=method, num_steps=asked, **report))


def check_report(sampling: SamplingParams, answer: Answer, num_steps: int, seen: Counter[str]) -> None:
    """Every token is in the report of a step, and no step verified more than it may; `seen` counts what happened.

    `num_steps`: the engine's.
    """
    asked = sampling.speculative
    assert bool(answer.verified) == (asked.is_reported and bool(answer.token_ids))
    if not answer.verified:
        return
    most = num_steps if asked.num_steps is None else asked.num_steps
    (first, first_count), *later = answer.verified
    assert (first.proposed, first.accepted, first_count) == (0, 0, 1), "a prompt's step verifies nothing"
    for verified, count in later:
        assert 0 <= verified.accepted <= verified.proposed <= most
        assert 1 <= count <= verified.accepted + 1
        seen["limited_steps"] += 0 < verified.proposed == most < num_steps
        seen["steps_of_plain_requests"] += most == 0 < num_steps
    assert all(count == verified.accepted + 1 for verified, count in answer.verified[:-1]), "only an end cuts a run"
    assert sum(count for _, count in answer.verified) == len(answer.token_ids)
    steps = [verified.step_id for verified, _ in answer.verified]
    assert steps == sorted(set(steps)), "steps out of order"
    assert answer.finish is not None and answer.usage is not None
    if answer.finish.kind is not FinishKind.ABORT:
        plain = sum(verified.proposed == 0 for verified, _ in later)  # decode steps, or prefills after a preemption
        least, count = (0, 0) if most == 0 else (len(later) - plain, len(later))
        assert least <= answer.usage.spec_verify_ct <= count
