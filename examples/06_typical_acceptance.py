"""A verifier of your own, in one file: Medusa's typical acceptance, which is LOSSY at temperature > 0.

python examples/06_typical_acceptance.py [MODEL HEAD]      HEAD: the EAGLE-3 head of MODEL that drafts
"""

import asyncio
import sys
from dataclasses import replace

import torch
from torch import Tensor

from overlap_spec import Engine, EngineConfig, SamplingParams
from overlap_spec.hub.smollm2 import DRAFT
from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.sampler import draw_after, log_weights, processed_logits, slices
from overlap_spec.speculative.interfaces import Drawn, SlotBatch, Window, window_context
from overlap_spec.speculative.methods import method_named
from overlap_spec.speculative.verification import Verification, VerifierInputs

EPSILON, DELTA = 0.09, 0.3


class TypicalVerifier:
    """Accepts a guess x that is typical, p(x) > min(EPSILON, DELTA * exp(-H(p))), or what the target draws itself.

    Cai et al. 2024, arXiv:2401.10774, section on typical acceptance; p is what plain decoding would draw from, H its
    entropy. At temperature 0 the target's argmax is drawn, and nothing else is accepted.
    """

    def __init__(self, inputs: VerifierInputs) -> None:
        self.token_ids, self.draw = inputs.token_ids, inputs.draw

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """The token that follows each column of the window: a typical guess, else plain decoding's. Sync: never."""
        sampling, context = batch.sampling, window_context(window, batch, self.token_ids)
        if not sampling.work.sampled:
            return Drawn(draw_after(lazy_logits, context))
        logits = processed_logits(lazy_logits, context)
        drawn = self.draw(logits, context.positions, sampling, self.token_ids)
        guesses = torch.nn.functional.pad(window.tokens[:, 1:], (0, 1), value=-1)  # none follows the last column
        judged = [is_typical(log_weights(logits, sampling, part), guesses[part]) for part in slices(logits)]
        return Drawn(torch.where(torch.cat(judged) & (sampling.temperature > 0)[:, None], guesses, drawn))


def is_typical(log_weights: Tensor, guesses: Tensor) -> Tensor:
    """Shapes: log_weights [b * W, V], -inf for what filters drop; guesses [b, W], -1: none -> bool [b, W]."""
    p = log_weights.softmax(1)
    p_guess = p.gather(1, guesses.clamp(min=0).view(-1, 1)).squeeze(1)
    threshold = (DELTA * torch.exp(torch.special.entr(p).sum(1).neg())).clamp(max=EPSILON)
    return (p_guess > threshold).view(guesses.shape) & (guesses >= 0)


TYPICAL = replace(
    method_named("EAGLE3"),  # its drafts; `verifications`: all the ways in which they may be judged
    name="TYPICAL",
    verifications=(Verification(TypicalVerifier, name="typical acceptance", is_lossy=True),),
)
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
COLD = SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)
HOT = [SamplingParams(max_new_tokens=64, temperature=1.0, seed=i, ignore_eos=True) for i in range(16)]


async def main(model: str = "smollm2", head: str = str(DRAFT)) -> None:
    """Compare it with match verification on 16 sampled answers and a greedy one."""
    prompt, greedy = "Once upon a time", []
    for algorithm in ("EAGLE3", "06_typical_acceptance:TYPICAL"):
        asked = {"speculative_algorithm": algorithm, "speculative_draft_model_path": head, **CHAIN}
        async with Engine(EngineConfig(model_path=model, log_level="error", **asked)) as engine:
            sampled = await asyncio.gather(*(engine.client.complete(prompt, sampling) for sampling in HOT))
            greedy.append(await engine.client.complete(prompt, COLD))
            print(f"{engine.facts.worker.verification}: accept length", end=" ")
            print(f"{16 * 63 / sum(answer.usage.spec_verify_ct for answer in sampled):.2f} at temperature 1")
    print("greedy tokens are the same:", greedy[0].token_ids == greedy[1].token_ids)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
