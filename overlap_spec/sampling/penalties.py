"""Repetition, presence and frequency penalties and biases of tokens, exact for every row of a window.

    logit > 0: logit / repetition, else logit * repetition      if the token is in the prompt or in the output
    less frequency * n                                          where it is n times in the output
    less presence                                               if it is in the output
    plus bias                                                   logit_bias; -inf if only other tokens are allowed

The output of a row is what is committed and then the guesses that lead to the row. So a row has the penalties that
plain decoding has there. Nothing is counted from step to step: each step counts the tokens of the token pool, which is
whole after a prefix hit and after a preemption.
"""

from overlap_spec_kernels import Penalized
from overlap_spec_kernels import penalize as penalize_logits
from torch import Tensor

from overlap_spec.sampling.context import DrawContext


def penalize(logits: Tensor, context: DrawContext) -> Tensor:
    """New logits; of a slot without penalties and biases the same values. Sync: never.

    Shapes: [B, R, N] -> [B, R, N].
    """
    sampling, lists = context.sampling, context.sampling.processors.lists
    asked = Penalized(sampling.penalties, sampling.slots, lists.has, lists.bias)
    return penalize_logits(logits, asked, context.history.counts, context.guesses, context.token_ids)
