"""Reads answers whose tokens are known, in forwards of a given shape, as a step computes them.

For measuring what the shape of a batch does to logits.
"""

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig, Machine, ModelFiles
from overlap_spec.config.resolve import resolve
from overlap_spec.models.interfaces import RowBatch, TargetModel
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.loading.loader import load_target
from overlap_spec.speculative.rows import chunk_rows
from overlap_spec.worker.build import prepare_place

PAGE_SIZE, PAGES = 16, 10  # pages of a request


class AnswerReader:
    """A target with room for `most` requests."""

    def __init__(self, files: ModelFiles, device: str, dtype: str, most: int) -> None:
        config = EngineConfig(device=device, dtype=dtype, speculative_algorithm="NONE")
        settings, _ = resolve(config, files, Machine(2, device == "cuda"))
        self._place = prepare_place(settings)
        torch_dtype = getattr(torch, dtype)
        loaded = load_target(settings.model.files, torch_dtype, self._place)
        cache = KVCache.allocate(loaded.kv_shape, 1 + most * PAGES, PAGE_SIZE, torch_dtype, self._place)
        self._target: TargetModel = loaded.attach(cache, PAGES * PAGE_SIZE)

    def logits(self, prompts: list[list[int]], answers: list[list[int]], batch: int, width: int) -> Tensor:
        """Logits of every answer's tokens, one answer after another. Shapes: -> [tokens, V] f32."""
        parts = []
        for first in range(0, len(prompts), batch):
            group = slice(first, first + batch)
            parts += self._read(prompts[group], answers[group], batch, width)
        return torch.cat(parts)

    def _read(self, prompts: list[list[int]], answers: list[list[int]], batch: int, width: int) -> list[Tensor]:
        """One group, filled up to `batch` with its last request; a row past an answer's end is thrown away."""
        count = len(prompts)
        slots = [min(slot, count - 1) for slot in range(batch)]
        tables = (1 + torch.arange(batch * PAGES, dtype=torch.int32, device=self._place)).view(batch, PAGES)
        firsts = [self._prefill(prompts[at], tables[slot : slot + 1]) for slot, at in enumerate(slots)]
        longest = max(len(answer) for answer in answers)
        fed = [[*answers[at], *[0] * (longest + width)] for at in slots]
        steps = []
        for start in range(0, max(longest - 1, 1), width):
            tokens = torch.tensor([row[start : start + width] for row in fed], device=self._place)
            positions = torch.tensor([[len(prompts[at]) + start + i for i in range(width)] for at in slots])
            rows = RowBatch(positions.view(-1).to(self._place), None, tables, None, width, True)
            steps.append(self._forward(tokens.view(-1), rows).view(batch, width, -1))
        after = torch.cat(steps, dim=1)  # after token i of the answer stands token i + 1
        return [torch.cat((firsts[slot], after[slot, : len(answers[slot]) - 1])) for slot in range(count)]

    def _prefill(self, prompt: list[int], table: Tensor) -> Tensor:
        """Shapes: -> [1, V], the logits of the first token."""
        positions = torch.arange(len(prompt), device=self._place)
        starts = torch.tensor([0, len(prompt)], device=self._place)
        rows = chunk_rows(table, torch.zeros_like(positions), positions, starts, len(prompt), PAGE_SIZE)
        return self._forward(torch.tensor(prompt, device=self._place), rows)[-1:]

    def _forward(self, tokens: Tensor, rows: RowBatch) -> Tensor:
        with torch.inference_mode():
            return self._target.logits(self._target.forward(tokens, rows).final).compute()
