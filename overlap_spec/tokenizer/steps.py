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


class Gained(msgspec.Struct, gc=False):
    """What one or several steps added to one request."""

    run: Run
    cached_tokens: int | None
    verified: Verified | None
    log_probs: bytes

    @property
    def is_plain(self) -> bool:
        """Whether it can be joined to others, and cut."""
        return self.verified is None and not self.log_probs

    def join(self, later: "Gained") -> None:
        """Both are plain."""
        self.run.tokens += later.run.tokens
        self.run.parts += later.run.parts
        self.run.finish = later.run.finish

    def cut(self, num_tokens: int) -> "Gained":
        """Take the first steps away, until they have so many tokens; some are left."""
        run, taken, num_parts = self.run, 0, 0
        while taken < num_tokens and num_parts + 1 < len(run.parts):
            taken += run.parts[num_parts].num_tokens
            num_parts += 1
        first = Gained(Run(run.tokens[:taken], None, run.parts[:num_parts]), self.cached_tokens, None, b"")
        self.run, self.cached_tokens = Run(run.tokens[taken:], run.finish, run.parts[num_parts:]), None
        return first


class Gains(msgspec.Struct):
    """What one or several steps added: runs and their log-probs by uid, as in `TokenDeltas`."""

    step_id: int  # the last one's
    runs: dict[int, Run]
    verified: dict[int, Verified]
    log_probs: dict[int, bytes]
    cached_tokens: dict[int, int]

    def of(self, uid: int, run: Run) -> Gained:
        """What one request gained."""
        return Gained(run, self.cached_tokens.get(uid), self.verified.get(uid), self.log_probs.get(uid, b""))


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
    of_uids = dict(step.verified), dict(step.log_probs), dict(step.cached_tokens)
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
