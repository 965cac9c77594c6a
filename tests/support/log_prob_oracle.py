"""The oracle of log-probs: a request's tokens, prompt and output, in one forward; log-softmax in plain Python.

Whatever drew the tokens does not matter: log-probs are a function of the tokens before a position.
"""

import math
from array import array
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from overlap_spec.client.log_probs import Candidate, TokenLogProb
from overlap_spec.messages import FinishKind, LogProbParams, ResetSlot, SamplingParams
from overlap_spec.models.interfaces import LoadedTarget, RowBatch, TargetOutput
from overlap_spec.speculative.drafts import NoDraft, NoProposer
from overlap_spec.worker.build import build_executor
from support.plans import SlotPart, plan_of
from support.ring import Answer, RingConfig, tiny_loaded
from support.tiny.models import CPU

EXACT = 1e-12


class ForwardedTarget:
    """A loaded target whose last forward can be read, all rows of it."""

    def __init__(self, loaded: LoadedTarget) -> None:
        self._loaded = loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def attach(self, *given: Any) -> Any:
        """Make it runnable, and keep what its layers give."""
        self._model = self._loaded.attach(*given)
        forward = self._model.forward

        def kept(tokens: Tensor, rows: RowBatch) -> TargetOutput:
            self._output = forward(tokens, rows)
            return self._output

        self._model.forward = kept
        return self._model

    def all_logits(self) -> list[list[float]]:
        """The logits after each row."""
        with torch.inference_mode():
            return self._model.logits(self._output.final).compute().tolist()


class LogProbOracle:
    """Knows the distribution after every position. `tolerance`: absolute."""

    def __init__(self, seed: int, family: str = "llama", tolerance: float = EXACT) -> None:
        self._geometry = RingConfig(num_steps=0, page_size=16, num_pages=40, num_slots=1, max_len=400).geometry()
        models = tiny_loaded(seed, 0, torch.float64, CPU, family=family)
        self._target = ForwardedTarget(models.target)
        reads_all = NoDraft(lambda shape: NoProposer())  # an unknown draft may read every row
        self._executor = build_executor(replace(models, target=self._target, proposer=reads_all), self._geometry, CPU)
        self._tolerance = tolerance

    def close(self) -> None:
        self._executor.close()

    def check(self, prompt: list[int], sampling: SamplingParams, answer: Answer, what: str) -> None:
        """Every token that was returned has its entry, and only those; of the prompt those that were asked for."""
        asked = sampling.log_probs
        if asked is None:
            assert not answer.log_probs and not answer.prompt_log_probs, what
            return
        assert [entry.token_id for entry in answer.log_probs] == answer.token_ids, what
        first = len(prompt) if asked.prompt_from is None else asked.prompt_from
        if not answer.prompt_log_probs and answer.finish is not None and answer.finish.kind is FinishKind.ABORT:
            first = len(prompt)  # ended before its prompt was whole
        after = self.log_probs_after(prompt + answer.token_ids)
        for index, entry in enumerate(answer.log_probs):
            self._check_entry(entry, after[len(prompt) + index - 1], asked, f"{what}, output token {index}")
        assert [entry.token_id for entry in answer.prompt_log_probs] == prompt[first:], what
        for position, entry in enumerate(answer.prompt_log_probs, first):
            if position == first:
                assert (entry.log_prob, entry.top, entry.listed) == (None, [], []), what
            else:
                self._check_entry(entry, after[position - 1], asked, f"{what}, prompt token {position}")

    def log_probs_after(self, tokens: list[int]) -> list[list[float]]:
        """Of every token of the vocabulary, after each of `tokens`."""
        reset = ResetSlot(SamplingParams(temperature=0.0, seed=0), len(tokens), (), 0)
        pages = list(range(1, self._geometry.num_page_columns + 1))
        work = SlotPart(0, pages, 0, array("i", tokens).tobytes(), -1, reset)
        self._executor.launch(plan_of(0, [work], 1)).wait()
        return [log_softmax(row) for row in self._target.all_logits()]

    def _check_entry(self, entry: TokenLogProb, expected: list[float], asked: LogProbParams, what: str) -> None:
        assert entry.log_prob is not None
        assert abs(entry.log_prob - expected[entry.token_id]) < self._tolerance, what
        best = sorted(range(len(expected)), key=lambda token: (-expected[token], token))[: asked.top]
        self._check_candidates(entry.top, best, expected, what)
        self._check_candidates(entry.listed, list(asked.token_ids), expected, what)
        for candidate in entry.top + entry.listed:
            if candidate.token_id == entry.token_id:
                assert candidate.log_prob == entry.log_prob, f"{what}: the same number, to the bit"

    def _check_candidates(self, found: list[Candidate], ids: list[int], expected: list[float], what: str) -> None:
        assert [candidate.token_id for candidate in found] == ids, what
        for candidate in found:
            assert abs(candidate.log_prob - expected[candidate.token_id]) < self._tolerance, what


def log_softmax(logits: list[float]) -> list[float]:
    """By the definition, in float64."""
    largest = max(logits)
    total = largest + math.log(math.fsum(math.exp(logit - largest) for logit in logits))
    return [logit - total for logit in logits]
