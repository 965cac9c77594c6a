"""What steps added to requests, joined where several have come: a tokenizer that is behind handles them as one.

Nothing is lost by that: a run knows where each step ended, so a request that ends within it is counted up to there. A
step that a request reports on its own (`verified`) is joined to no other step of that request.
"""

from collections.abc import Iterator, Sequence

import msgspec

from overlap_spec.messages import Finish, TokenDeltas, Verified


class Part(msgspec.Struct, frozen=True, gc=False):
    """One step's part of a run. `verify_steps`: of the request after it."""

    step_id: int
    num_tokens: int
    verify_steps: int


class Run(msgspec.Struct, gc=False):
    """The tokens that steps added to one request; the finish is the last step's."""

    tokens: list[int]
    finish: Finish | None
    parts: list[Part]

    def verify_steps(self, num_served: int) -> int:
        """Up to the step that committed the last of so many tokens; up to the last step, if all are served."""
        left = num_served
        if left < len(self.tokens):
            for part in self.parts:
                left -= part.num_tokens
                if left <= 0:
                    return part.verify_steps
        return self.parts[-1].verify_steps

    def by_step(self, served: list[int]) -> Iterator[tuple[int, list[int]]]:
        """The served tokens of each step, with its id."""
        start = 0
        for part in self.parts:
            if tokens := served[start : start + part.num_tokens]:
                yield part.step_id, tokens
            start += part.num_tokens


class Gains(msgspec.Struct):
    """What one or several steps added: runs and log-probs by uid, as in `TokenDeltas`."""

    step_id: int  # the last one's
    runs: dict[int, Run]
    verified: dict[int, Verified]
    log_probs: dict[int, bytes]
    prompt_log_probs: dict[int, bytes]
    cached_tokens: dict[int, int]


def joined(steps: Sequence[TokenDeltas]) -> Iterator[Gains]:
    """All steps in order, as few as can be."""
    gains = _of_one(steps[0])
    for step in steps[1:]:
        if (gains.verified or step.verified) and _reports_again(gains, step):
            yield gains
            gains = _of_one(step)
        else:
            _join(gains, step)
    yield gains


def _of_one(step: TokenDeltas) -> Gains:
    rows = zip(step.uids, step.tokens, step.finishes, step.verify_steps, strict=True)
    runs = {uid: Run(tokens, finish, [Part(step.step_id, len(tokens), count)]) for uid, tokens, finish, count in rows}
    of_uids = dict(step.verified), dict(step.log_probs), dict(step.prompt_log_probs), dict(step.cached_tokens)
    return Gains(step.step_id, runs, *of_uids)


def _reports_again(gains: Gains, step: TokenDeltas) -> bool:
    """Whether a request with a report of its own for each step has a row in both."""
    return any(uid in gains.runs and (uid in gains.verified or uid in step.verified) for uid in step.uids)


def _join(gains: Gains, step: TokenDeltas) -> None:
    gains.step_id = step.step_id
    runs = gains.runs
    for uid, tokens, finish, verify_steps in zip(step.uids, step.tokens, step.finishes, step.verify_steps, strict=True):
        part = Part(step.step_id, len(tokens), verify_steps)
        run = runs.get(uid)
        if run is None:
            runs[uid] = Run(tokens, finish, [part])
        else:
            run.tokens += tokens
            run.finish = finish
            run.parts.append(part)
    gains.verified |= step.verified
    gains.cached_tokens |= step.cached_tokens
    for uid, records in step.log_probs.items():
        gains.log_probs[uid] = gains.log_probs.get(uid, b"") + records
    for uid, records in step.prompt_log_probs.items():
        gains.prompt_log_probs[uid] = gains.prompt_log_probs.get(uid, b"") + records
