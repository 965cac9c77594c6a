"""A logit processor of your own, in one file: no three tokens in a row come twice in prompt and answer together.

python examples/07_no_repeated_trigram.py [MODEL]        the worker imports it: --logit-processor MODULE:NAME
"""

import asyncio
import sys
from itertools import pairwise

import torch

from overlap_spec import Engine, EngineConfig, SamplingParams


class NoRepeatedTrigram:
    """`whole`: trigrams of the prompt count too; else only those that lie in the output."""

    def __init__(self, whole: bool = True) -> None:
        self.whole = whole

    def __call__(self, logits, context):
        """Every row has a history of its own: what is committed, and the guesses that the row follows.

        Shapes: logits [B, R, N], for R rows of each of B requests. Static shapes, no value is read: it is captured.
        """
        before = context.recent(context.depth + 2)  # [B, R, depth + 2] tokens: all guesses, and two more
        pair = before[:, :, -2:]  # what the drawn token will follow
        first = torch.zeros_like(context.output_from) if self.whole else context.output_from
        last = context.positions[:, :, None] - 3  # a trigram that begins here ends before the drawn token
        counts = last + 1 >= first[:, None, None]  # the new trigram itself

        tokens = context.committed  # [B, T], by position
        begins = torch.arange(tokens.shape[1] - 2, device=tokens.device)
        same = (tokens[:, None, :-2] == pair[:, :, :1]) & (tokens[:, None, 1:-1] == pair[:, :, 1:])
        same &= counts & (begins >= first[:, None, None])
        logits = context.forbid(logits, torch.where(same, tokens[:, None, 2:], -1))

        if context.depth == 0:
            return logits
        runs = before.unfold(2, 3, 1)  # [B, R, depth, 3]: trigrams that end with a guess
        begins = last + torch.arange(1 - context.depth, 1, device=tokens.device)
        same = (runs[:, :, :, :2] == pair[:, :, None]).all(3) & counts & (begins >= first[:, None, None])
        return context.forbid(logits, torch.where(same, runs[:, :, :, 2], -1))


NO_REPEATED_TRIGRAM = NoRepeatedTrigram()
NAME = "07_no_repeated_trigram:NO_REPEATED_TRIGRAM"  # a module that can be imported, and the processor in it


def repeated(tokens: list[int]) -> int:
    """How many trigrams come again."""
    trigrams = [(a, *b) for a, b in zip(tokens, pairwise(tokens[1:]), strict=False)]
    return len(trigrams) - len(set(trigrams))


async def main(model: str) -> None:
    answers, sampling = [], SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)
    for processor, flags in (
        (None, {}),
        (NAME, {"algorithm": "NONE"}),
        (NAME, {"algorithm": "NGRAM", "num_draft_tokens": 4}),
    ):
        asked = {f"speculative_{name}": flag for name, flag in ({"algorithm": "NONE"} | flags).items()}
        config = EngineConfig(model_path=model, log_level="warning", logit_processor=processor, **asked)
        async with Engine(config) as engine:
            answers.append(await engine.client.complete("One, two, three, one, two,", sampling))
    free, plain, speculative = (answer.token_ids for answer in answers)
    print(f"repeated trigrams: {repeated(free)} without it, {repeated(plain)} with it")
    print("tokens are those of plain decoding:", plain == speculative)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["smollm2"]))
