"""Drafting with an ordinary language model, written out for one request: the oracle for guesses and accept lengths.

Both models are transformers', each with its own cache; nothing of this project. The draft reads the committed tokens as
any language model does: the row at position p holds the token of p and predicts the one of p + 1.
"""

from typing import Any

import torch

from support.reference.loop import CachedModel, Step, num_accepted


def generate(
    target_model: Any, draft_model: Any, prompt: list[int], num_guesses: int, num_tokens: int
) -> tuple[int, list[Step]]:
    """Greedy decoding. Returns (first token, steps), ending when `num_tokens` are out."""
    target, draft = CachedModel(target_model), CachedModel(draft_model)
    with torch.no_grad():
        first = target.read(prompt, 0)[0][-1]
        committed, num_read, steps = [*prompt, first], 0, []
        while len(committed) < len(prompt) + num_tokens:
            guesses = [draft.read(committed[num_read:], num_read)[0][-1]]
            num_read = len(committed)  # right from here on; what the guesses leave behind is forgotten
            for _ in range(num_guesses - 1):
                guesses.append(draft.read(guesses[-1:], num_read + len(guesses) - 1)[0][-1])
            drawn, _ = target.read([committed[-1], *guesses], len(committed) - 1)
            accepted = num_accepted(guesses, drawn)
            steps.append(Step(guesses, accepted, drawn[: accepted + 1]))
            committed += drawn[: accepted + 1]
    return first, steps
