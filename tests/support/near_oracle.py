"""The oracle of 16-bit requests: at every position the best token, up to rounding, given the tokens before it.

In 16 bits the order of sums decides near-ties, and after one the rest of an answer is another. So an answer's own
tokens are read back in float64, with the same rounded weights, and no token may fall short of the best one by more than
rounding explains.
"""

import torch
from overlap_spec_kernels import gumbel
from torch import Tensor

from overlap_spec.frontend.codec import Codec
from overlap_spec.messages import FinishKind, SamplingParams
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.speculative.rows import chunk_rows
from support.plain_oracle import Endings
from support.ring_links import Answer
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_target

PAGE_SIZE, NUM_PAGES = 16, 9  # a request's, and the dummy page


def rounded_target(seed: int, dtype: torch.dtype, **shape: int) -> LoadedTarget:
    """The weights of `tiny_target` as they are rounded to `dtype`, in float64."""
    exact = tiny_target(seed, **shape)
    rounded = {name: tensor.to(dtype).double() for name, tensor in exact.tensors.items()}
    return load_tiny_target(TinyCheckpoint(exact.config, rounded))


class NearOracle:
    """Reads answers. `most`: by how much of a logit a token may fall short of the best one.

    `worst` is the largest shortfall that was seen, `near_ties` how many tokens were not the best.
    """

    def __init__(self, weights: LoadedTarget, codec: Codec, most: float) -> None:
        """`weights`: in float64."""
        cache = KVCache.allocate(weights.kv_shape, NUM_PAGES, PAGE_SIZE, torch.float64, CPU)
        self._target = weights.attach(cache, NUM_PAGES * PAGE_SIZE)
        self._ids = torch.arange(weights.vocab_size)
        self._endings = Endings(codec)
        self._most = most
        self.worst = 0.0
        self.near_ties = 0

    def close(self) -> None:
        pass

    def check(self, prompt: list[int], sampling: SamplingParams, answer: Answer, what: str) -> None:
        """Raises: AssertionError for a token that is not among the best, or another end than the tokens have."""
        tokens, finish = answer.token_ids, answer.finish
        assert finish is not None and answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(tokens)), what
        for end in range(1, len(tokens)):
            assert self._endings.finish(tokens[:end], sampling) is None, f"{what}: goes on after its end"
        if finish.kind is not FinishKind.ABORT:
            assert finish == self._endings.finish(tokens, sampling), what
            assert answer.text == self._endings.text(tokens, finish, sampling), what
        if tokens:
            self._check_tokens(prompt, tokens, sampling, what)

    def _check_tokens(self, prompt: list[int], tokens: list[int], sampling: SamplingParams, what: str) -> None:
        short = self._short(prompt, tokens, sampling)
        assert float(short.max()) < self._most, f"{what}: tokens fall short by {short.tolist()}"
        self.worst = max(self.worst, float(short.max()))
        self.near_ties += int((short > 0).sum())

    def falls_short(self, prompt: list[int], tokens: list[int], sampling: SamplingParams) -> float:
        """By how much the worst token of an answer falls short of the best one at its place."""
        return float(self._short(prompt, tokens, sampling).max())

    def _short(self, prompt: list[int], tokens: list[int], sampling: SamplingParams) -> Tensor:
        return self.shortfalls(prompt, tokens, sampling).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)

    def shortfalls(self, prompt: list[int], tokens: list[int], sampling: SamplingParams) -> Tensor:
        """By how much each token of the vocabulary falls short at each place. Shapes: -> [len(tokens), V] f64."""
        scores = self._scores(prompt, tokens, sampling)
        return scores.max(1, keepdim=True).values - scores

    def _scores(self, prompt: list[int], tokens: list[int], sampling: SamplingParams) -> Tensor:
        """What each token was the largest of, in units of logits. Shapes: -> [len(tokens), V] f64."""
        logits = self._logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        for stop_id in self._endings.stop_ids(sampling):
            logits[: sampling.min_new_tokens, stop_id] = -torch.inf
        if sampling.greedy:
            return logits
        assert sampling.top_k == -1 and sampling.top_p == 1 and sampling.min_p == 0, "a filter has an edge of its own"
        assert sampling.seed is not None
        positions = len(prompt) + torch.arange(len(tokens))
        noise = gumbel(torch.full_like(positions, sampling.seed), positions, self._ids)
        return logits + sampling.temperature * noise

    def _logits(self, tokens: list[int]) -> Tensor:
        """Shapes: -> [len(tokens), V] f64."""
        count = len(tokens)
        positions, pages = torch.arange(count), torch.arange(1, NUM_PAGES, dtype=torch.int32)
        starts = torch.tensor([0, count])
        rows = chunk_rows(pages[None], torch.zeros_like(positions), positions, starts, count, PAGE_SIZE)
        output = self._target.forward(torch.tensor(tokens), rows)
        return self._target.logits(output.final).compute()
