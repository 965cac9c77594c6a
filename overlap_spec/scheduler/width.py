"""How wide decode steps are: a policy chooses, `BatchWidths` applies it to the running batch.

Some requests ask for less speculation than the engine has, or for none. The policy chooses for the others, and learns
from them alone: guesses that a request did not want would look like guesses that failed. A step is no wider than the
limits of its requests allow, if the engine has such a width.
"""

from collections.abc import Sequence
from typing import Protocol

from overlap_spec.messages import StepPlan, StepResult
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.queues import RequestQueues
from overlap_spec.scheduler.requests import Request, rows_of

CHANCE = 8  # right guesses, as frequent as those of all, that are added to those of the requests that are left


class TokenEstimate(Protocol):
    """Tokens that a slot commits in a step of each width, while steps are `now` wide. Indices stand for widths."""

    def believed(self, now: int, behind: float = 0.0) -> list[float]: ...

    def hoped(self, now: int) -> list[float]: ...

    def observe(self, result: StepResult, asked: int = 0, share: float = 1.0) -> None: ...


class WidthPolicy:
    """Chooses widths of decode steps: this one always the same. A feature may bring one that learns."""

    learns = False  # whether it is told of results: a look at every slot takes time
    yields = False  # whether steps may be narrower than it chooses, so that prompts share them

    def __init__(self, width: int) -> None:
        self._width = width

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        """The width of the next decode step, of whose slots `num_plain` have no guesses."""
        return self._width

    def after_prompts(self, batch_size: int) -> int:
        """The width for which a prefill step proposes: that of the decode step after it, as far as is known."""
        return self.choose(batch_size)

    def drafts(self) -> bool:
        """Whether guesses are looked up after that step; after wide ones they must be. Asked once, if self-drafting."""
        return True

    def observe(self, result: StepResult, asked: int = 0, share: float = 1.0) -> None:
        """Learn from a settled decode step. The draft was `asked` for so many guesses, or 0. `share`: see `_share`."""

    def timed(self, batch_size: int, width: int, drafts: bool, seconds: float) -> None:
        """Learn from the time of a decode step that followed another one of its kind, as `drafts` said."""


class BatchWidths:
    """Chooses widths for the running batch. `policy` may be replaced between steps."""

    def __init__(self, limits: Limits) -> None:
        self.policy = WidthPolicy(limits.width)
        self.tokens: TokenEstimate | None = None  # a feature's that knows more of windows than their columns
        self._limits = limits
        self._chose = False  # whether the last width is the policy's
        self._known: list[Request] = []  # of the last step that the policy learnt from
        self._settled: tuple[int, bool] | None = None  # width and draft of the last step, if that only decoded

    def choose(self, queues: RequestQueues, narrowing: int = 0) -> int:
        """The width of the next decode step. `narrowing`: that which prompts beside it ask for; 0: none does."""
        limits, batch_size = self._limits, len(queues.running)
        self._chose = not (narrowing and self.policy.yields)
        if not self._chose:
            return narrowing
        if not queues.num_limited:
            return self.policy.choose(batch_size)
        most_steps = [limits.num_steps if each.most_steps is None else each.most_steps for each in queues.running]
        if (most := max(most_steps)) == 0:
            self._chose = False
            return limits.step_widths[0]
        width = self.policy.choose(batch_size, most_steps.count(0))
        if limits.num_steps + 1 != limits.width or limits.is_self_drafting:
            return width  # of a tree, and of n-grams, a narrower window has fewer guesses on every level
        return min(width, next(enough for enough in limits.step_widths if enough > most))

    def after_prompts(self, queues: RequestQueues, completes: bool) -> int:
        """The width that a prefill step proposes for. `completes`: whether any of its prompts."""
        return self.policy.after_prompts(len(queues.running)) if completes else 1

    def drafts(self) -> bool:
        """Whether the draft runs after the step whose width was chosen last. Called once, when it is planned."""
        return not self._chose or self.policy.drafts()

    def observe(self, requests: Sequence[Request], result: StepResult, asked: int = 0) -> None:
        """Learn from a settled decode step, but not from a slot that was left out.

        `asked`: the width that the draft was asked to fill; 0 where it was not. A model that gives no guess then, whose
        logits are NaN, counts as one whose guesses are wrong: else nothing would show that wide steps do not pay.
        """
        if not self.policy.learns:
            return
        if rows := [row for row, each in enumerate(requests) if result.tokens[row] and not each.is_limited]:
            num_asked = 0 if self._limits.is_self_drafting else max(asked - 1, 0)
            own = result if len(rows) == len(requests) else rows_of(result, rows)
            self.policy.observe(own, num_asked, self._share([requests[row] for row in rows]))

    def _share(self, requests: list[Request]) -> float:
        """Guesses accepted in a step for those that are left when others end, over those for all, where it was less."""
        before, self._known = self._known, requests
        if len(requests) >= len(before) or not {*requests} < {*before}:
            return 1.0
        few, many = [sum([len(each.tokens) - each.prompt_len - 1 for each in found]) for found in (requests, before)]
        steps, of_all = [sum([each.verify_steps for each in found]) for found in (requests, before)]
        expected = steps * (many - of_all) / max(of_all, 1)  # a prompt gives one token, and every step another
        return min((few - steps + CHANCE) / (expected + CHANCE), 1.0)

    def timed(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from the time of a settled step, or of a part of one.

        From tokens to tokens a step's time has the draft of the step before in it, so both must be of one kind.
        """
        alone = not plan.chunks and result.is_typical
        kind, seconds = (plan.width, plan.drafts) if alone else None, result.gpu_time + result.gpu_gap
        if kind is not None and kind == self._settled and seconds > 0:
            self.policy.timed(len(plan.slots), *kind, seconds)
        self._settled = kind
