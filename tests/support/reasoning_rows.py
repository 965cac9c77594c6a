"""Random rows whose requests have thinking budgets, and what they have to draw, worked out in plain Python."""

import random
from collections.abc import Callable

import torch
from overlap_spec_kernels import LogitRules, RowHistory, TokenRows
from torch import Tensor

from overlap_spec.features.thinking.worker import NO_BUDGET, packed_budget
from support.logit_inputs import no_rules
from support.sampling_oracle import must_draw

MARKERS = ((7,), (3, 4), (5, 5, 6))
VOCAB = 10

Process = Callable[[Tensor, LogitRules, RowHistory, Tensor], Tensor]  # `process_logits`


class RandomRows:
    """Some slots, a window of a tree for each, histories of few tokens so that markers come up."""

    def __init__(self, rng: random.Random, most_positions: int = 24, budgets: tuple[int, int] = (0, 9)) -> None:
        self.page_size = rng.choice((1, 4, 16))
        self.num_slots, self.num_rows, self.depth = rng.randint(1, 5), rng.randint(1, 4), rng.randint(0, 3)
        size = most_positions + 8
        pages = -(-size // self.page_size)
        self.page_table = torch.randperm(self.num_slots * pages).view(self.num_slots, pages).int() + 1
        self.pool = torch.randint(3, 8, ((self.num_slots * pages + 1) * self.page_size,), dtype=torch.int32)
        self.rows: list[list[list[int]]] = []
        self.asked: list[tuple[int, int, bool, tuple[int, ...], tuple[int, ...]] | None] = []
        self.output_from, self.roots = [], []
        for slot in range(self.num_slots):
            opening, closing = rng.choice(MARKERS), rng.choice(MARKERS)
            output_from = rng.randint(1, 6)
            budget = rng.randint(*budgets)
            length = min(most_positions, output_from + budget + rng.randint(0, 5))
            history = [rng.choice((1, 1, 1, 3, 5, 7)) for _ in range(max(length, output_from + 1))]
            if rng.random() < 0.5:
                history[output_from : output_from + len(opening)] = opening
            root = len(history) - 1
            for position, token in enumerate(history):
                page = int(self.page_table[slot, position // self.page_size])
                self.pool[page * self.page_size + position % self.page_size] = token
            self.output_from.append(output_from)
            self.roots.append(root)
            no_budget = rng.random() < 0.2
            self.asked.append(None if no_budget else (output_from, budget, rng.random() < 0.5, opening, closing))
            guesses = [
                [rng.choice((3, 4, 5, 6, 7)) for _ in range(rng.randint(0, self.depth))] for _ in range(self.num_rows)
            ]
            self.rows.append([history + each for each in guesses])

    def arguments(self, device: str = "cpu") -> tuple[LogitRules, RowHistory]:
        """Of `process_logits`. Nothing is counted, and nothing else is asked for."""
        positions = torch.tensor([[len(row) for row in rows] for rows in self.rows])
        guesses = torch.full((self.num_slots, self.num_rows, self.depth), -1)
        for slot, rows in enumerate(self.rows):
            for index, row in enumerate(rows):
                guessed = row[self.roots[slot] + 1 :]
                if guessed:
                    guesses[slot, index, -len(guessed) :] = torch.tensor(guessed)
        budgets = [list(NO_BUDGET) if asked is None else packed_budget(*asked[1:]) for asked in self.asked]
        store = TokenRows(self.pool.to(device), self.page_table.to(device), self.page_size)
        counts = torch.zeros(self.num_slots, VOCAB, dtype=torch.int32)
        rest = (each.to(device) for each in (torch.tensor(self.roots), positions, guesses, counts))
        asked = {"budgets": torch.tensor(budgets).to(device), "output_from": torch.tensor(self.output_from).to(device)}
        return no_rules(self.num_slots, VOCAB, device)._replace(**asked), RowHistory(store, *rest)

    def processed(self, process: Process, ids: Tensor, device: str = "cpu") -> Tensor:
        """Logits that were all 0. Shapes: ids [N] i64 -> [B, R, N]."""
        logits = torch.zeros(self.num_slots, self.num_rows, len(ids), device=device)
        return process(logits, *self.arguments(device), ids.to(device))

    def forced(self, process: Process, device: str = "cpu") -> list[list[int]]:
        """The token that each row is left with, -1 where that is more than one."""
        left = self.processed(process, torch.arange(VOCAB), device).isfinite()
        return torch.where(left.sum(2) == 1, left.int().argmax(2), -1).tolist()


def by_hand(rows: RandomRows) -> list[list[int]]:
    """What every row has to draw."""
    return [
        [-1 if asked is None else must_draw(row, *asked) for row in of_slot]
        for asked, of_slot in zip(rows.asked, rows.rows, strict=True)
    ]
