"""How wide steps are when some requests ask for less speculation than the engine has, or for none.

A policy chooses for the requests without a limit and learns from them alone: guesses that a request did not want would
look like guesses that failed. A step is no wider than the limits of its requests allow, if the engine has such a width.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from overlap_spec.messages import Extension, Rows, StepPlan, StepResult, TreePaths
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.queues import RequestQueues
from overlap_spec.scheduler.requests import Request
from overlap_spec.scheduler.width.policy import FixedWidth, WidthPolicy
from overlap_spec.scheduler.width.seconds import TimedStep


class BatchWidths:
    """Chooses widths for the running batch. `policy` may be replaced between steps."""

    def __init__(self, policy: WidthPolicy, limits: Limits) -> None:
        self.policy = policy
        self._widths = limits.step_widths
        self._num_steps = limits.num_steps
        self._chose = False  # whether the last width is the policy's
        self._settled: tuple[int, bool] | None = (
            None  # width and rest of the last step, if that was a decode step alone
        )
        self._is_self_drafting = limits.is_self_drafting
        # Of a tree, and of n-grams, a narrower window has fewer guesses on every level.
        self._narrows = limits.num_steps + 1 == limits.width and not limits.is_self_drafting

    def choose(self, queues: RequestQueues) -> int:
        """The width of the next decode step."""
        batch_size = len(queues.running)
        self._chose = True
        if not queues.num_limited:
            return self.policy.choose(batch_size)
        most_steps = [self._num_steps if each.most_steps is None else each.most_steps for each in queues.running]
        most = max(most_steps)
        if most == 0:
            self._chose = False
            return self._widths[0]
        width = self.policy.choose(batch_size, most_steps.count(0))
        return min(width, self._enough_for(most)) if self._narrows else width

    def after_prompts(self, queues: RequestQueues, completes: bool) -> int:
        """The width that a prefill step proposes for. `completes`: whether any of its prompts."""
        return self.policy.after_prompts(len(queues.running)) if completes else 1

    def drafts(self) -> bool:
        """Whether the draft runs after the step whose width was chosen last. Called once, when it is planned."""
        return not self._chose or self.policy.drafts()

    def observe(self, requests: Sequence[Request], result: StepResult, asked: int = 0) -> None:
        """Learn from a settled decode step. Nothing is learnt from a slot that was left out.

        `asked`: the width that the draft was asked to fill; 0 where it was not. A model that gives no guess then, whose
        logits are NaN, counts as one whose guesses are wrong: else nothing would show that wide steps do not pay.
        """
        if isinstance(self.policy, FixedWidth):
            return  # it learns nothing, and a look at every slot takes time
        runs = result.tokens
        if asked and not self._is_self_drafting and 0 in result.num_proposed:
            result = _with_wrong_guesses(result, asked)
        if all(runs) and not any([request.is_limited for request in requests]):
            self.policy.observe(result)
        elif rows := [row for row, request in enumerate(requests) if runs[row] and not request.is_limited]:
            self.policy.observe(rows_of(result, rows))

    def timed(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from the time of a settled step, or of a part of one.

        From tokens to tokens a step's time has the draft of the step before in it, so both must be of one kind.
        """
        alone = not (plan.chunks or result.caught_up)
        kind = (plan.width, not plan.drafts) if alone else None
        seconds = result.gpu_time + result.gpu_gap
        waited = result.gpu_gap if result.launch_time > 0 else 0.0  # without launches a step is its own host's work
        if kind is not None and kind == self._settled and seconds > 0:
            self.policy.timed(TimedStep(len(plan.slots), *kind, seconds, waited))
        self._settled = kind

    def _enough_for(self, most_steps: int) -> int:
        return next(width for width in self._widths if width > most_steps)


def _with_wrong_guesses(result: StepResult, width: int) -> StepResult:
    """Whole windows where there was no guess."""
    num_proposed = [n or width - 1 for n in result.num_proposed]
    extensions = tuple([_with_last_guesses(each, width - 1) for each in result.extensions])
    return replace(result, num_proposed=num_proposed, extensions=extensions)


def _with_last_guesses(extension: Extension, last: int) -> Extension:
    if not isinstance(extension, TreePaths):
        return extension
    return replace(extension, last_guesses=[column or last for column in extension.last_guesses])


def rows_of(result: StepResult, rows: Sequence[int]) -> StepResult:
    """The result of some of the slots."""
    tokens, num_proposed = [result.tokens[row] for row in rows], [result.num_proposed[row] for row in rows]
    extensions = tuple([each.take(rows) if isinstance(each, Rows) else each for each in result.extensions])
    return replace(result, tokens=tokens, num_proposed=num_proposed, extensions=extensions)
