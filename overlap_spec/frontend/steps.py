"""Joins what several steps added to a request: a frontend that is behind handles them as one.

Nothing is lost by that: a run knows where each step ended, so a request that ends within it is counted up to there. A
step that a request reports on its own (`verified`) is joined to no other step of that request.
"""

from collections.abc import Iterator, Sequence

import msgspec

from overlap_spec.messages import Finish, PackedRows, TokenDeltas, Verified


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
    """What one or several steps added, by uid. `packed`: what else is known of tokens, for a feature to read."""

    step_id: int  # the last one's
    runs: dict[int, Run]
    verified: dict[int, Verified]
    packed: dict[int, bytes]
    cached_tokens: dict[int, int]

    def of(self, uid: int) -> "Gains":
        own = Gains(self.step_id, {uid: self.runs[uid]}, {}, {}, {})
        if uid in self.cached_tokens:
            own.cached_tokens[uid] = self.cached_tokens[uid]
        if uid in self.verified:
            own.verified[uid] = self.verified[uid]
        if uid in self.packed:
            own.packed[uid] = self.packed[uid]
        return own

    @property
    def is_plain(self) -> bool:
        """Whether tokens are all that steps have added, so that it can be joined to others and cut."""
        return not self.verified and not self.packed

    def join(self, later: "Gains") -> None:
        """Both are plain, and of one request."""
        for uid, added in later.runs.items():
            run = self.runs[uid]
            run.tokens += added.tokens
            run.parts += added.parts
            run.finish = added.finish
        self.cached_tokens |= later.cached_tokens
        self.step_id = later.step_id

    def cut(self, num_tokens: int) -> "Gains":
        """Take the first steps away, until they have so many tokens; some are left. It is plain, and of one request."""
        ((uid, run),) = self.runs.items()
        taken = num_parts = 0
        while taken < num_tokens and num_parts + 1 < len(run.parts):
            taken += run.parts[num_parts].num_tokens
            num_parts += 1
        first = Run(run.tokens[:taken], None, run.parts[:num_parts])
        self.runs[uid] = Run(run.tokens[taken:], run.finish, run.parts[num_parts:])
        cached, self.cached_tokens = self.cached_tokens, {}
        return Gains(first.parts[-1].step_id, {uid: first}, {}, {}, cached)


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
    of_uids = dict(step.verified), _packed(step), dict(step.cached_tokens)
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
    for uid, records in _packed(step).items():
        gains.packed[uid] = gains.packed.get(uid, b"") + records


def _packed(step: TokenDeltas) -> dict[int, bytes]:
    rows = [each for each in step.extensions if isinstance(each, PackedRows)]
    return {uid: records for each in rows for uid, records in zip(step.extended, each.tokens, strict=False) if records}
