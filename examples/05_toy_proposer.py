"""A drafting method of your own, in one file: after each token, guess what came after it the last time.

python examples/05_toy_proposer.py [MODEL]          the worker imports it: --speculative-algorithm MODULE:METHOD
"""

import asyncio
import sys

import torch

from overlap_spec import Engine, EngineConfig, SamplingParams
from overlap_spec.speculative.drafts import NoDraft, NoProposer
from overlap_spec.speculative.interfaces import Guesses
from overlap_spec.speculative.methods import Method


class Followers(NoProposer):
    """`after[slot, token]`: the token that came after it, -1 if none did. Nothing here waits for the device."""

    def __init__(self, shape, vocab_size):
        self.after = torch.full((shape.num_rows, vocab_size), -1, device=shape.device)
        self.root = torch.zeros(shape.num_rows, dtype=torch.int64, device=shape.device)

    def prefill(self, prompts, rows, output):  # chunks of prompts, one after another
        self.after[prompts.chunk_slots] = torch.where(prompts.fresh[:, None] > 0, -1, self.after[prompts.chunk_slots])
        chunk = torch.searchsorted(rows.row_starts[1:].long(), torch.ones_like(rows.positions).cumsum(0))  # of each row
        self.after[prompts.chunk_slots[chunk], prompts.tokens] = prompts.next_tokens
        return prompts.next_tokens[prompts.last_rows, None]  # for `propose`: the last token of each

    def extend(self, batch, rows, output, verdict):  # what a step commits, padded with -1
        before = torch.cat((self.root[batch.slots, None], verdict.tokens[:, :-1].clamp(min=0)), 1)
        slots = torch.where(verdict.tokens < 0, len(self.after) - 1, batch.slots[:, None])  # the last is the dummy
        self.after[slots, before] = verdict.tokens
        return verdict.tokens.gather(1, verdict.accept_len[:, None])

    def propose(self, batch, learnt, num_guesses):
        tokens = [learnt[:, 0]]
        self.root[batch.slots] = tokens[0]
        for _ in range(num_guesses):
            tokens.append(torch.where(tokens[-1] < 0, -1, self.after[batch.slots, tokens[-1].clamp(min=0)]))
        return Guesses(torch.stack(tokens)[1:])


FOLLOW = Method("FOLLOW", 0, lambda spec, target, progress: NoDraft(lambda shape: Followers(shape, target.vocab_size)))


async def main(model):
    answers, sampling = [], SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)
    chain = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    for asked in ({"speculative_algorithm": "NONE"}, {"speculative_algorithm": "05_toy_proposer:FOLLOW", **chain}):
        async with Engine(EngineConfig(model_path=model, log_level="warning", **asked)) as engine:
            answers.append(await engine.client.complete("One, two, three, one, two,", sampling))
    print("tokens are those of plain decoding:", answers[0].token_ids == answers[1].token_ids)
    print(f"accept length: {63 / answers[1].usage.spec_verify_ct:.2f}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["smollm2"]))
