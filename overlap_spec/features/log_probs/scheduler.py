"""Log-probs of a prompt in the scheduler: which of its rows leave the device, so that the cache serves none of them."""

from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.hooks import SchedulerHook
from overlap_spec.scheduler.requests import Request


def attach(parts: Parts) -> SchedulerHook:
    """Any request may ask for log-probs of its prompt."""
    return PromptLogProbs()


class PromptLogProbs(SchedulerHook):
    """Sets the rows of new requests."""

    def admitted(self, request: Request) -> bool:
        """Of a request that goes on after a restart the prompt's log-probs are returned already."""
        asked = request.admit.sampling.log_probs
        if asked is not None and asked.prompt_from is not None and request.admit.resumed is None:
            request.let_out(asked.prompt_from, asked.record_bytes)
        return False
