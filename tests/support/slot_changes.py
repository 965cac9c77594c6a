"""Random slot tables, and changes to some slots, packed out of order: where they are is for the fields to say."""

import random
from dataclasses import replace
from typing import NamedTuple

import torch
from overlap_spec_kernels import CHANGE_FIELDS, SlotTables
from torch import Tensor

# (changes, columns of the page table, R, E): one program for a row's page table, and several; with no feature E is 0
CHANGE_SHAPES = [(1, 1, 1, 1), (1, 40, 72, 25), (5, 40, 72, 25), (33, 9, 7, 8), (4, 40, 72, 0), (3, 2500, 72, 25)]


class Change(NamedTuple):
    """What a slot gets."""

    slot: int
    first: int
    pages: list[int]
    row: list[int] | None


def slot_tables(num_slots: int, columns: int, *widths: int) -> SlotTables:
    """Filled with what no change writes."""
    spare = 2  # rows of tables that more slots have than page tables
    tables = [torch.randint(-9, 0, (num_slots + spare, width)) for width in widths]
    return SlotTables(torch.randint(-9, 0, (num_slots, columns), dtype=torch.int32), *tables)


def copied(tables: SlotTables, device: str = "cpu") -> SlotTables:
    """Of their own memory."""
    names = ("page_table", "rows", "added")
    return replace(tables, **{name: getattr(tables, name).to(device, copy=True) for name in names})


def random_changes(count: int, tables: SlotTables) -> list[Change]:
    """Of different slots: some get a new row, some pages, some both; rows hold any bits, those of doubles too."""
    chosen = random.Random(count)
    columns, found = tables.page_table.shape[1], []
    for i, slot in enumerate(chosen.sample(range(len(tables.page_table)), count)):
        row = None if i % 3 == 2 else [chosen.randrange(-(1 << 63), 1 << 63) for _ in range(tables.reset_width)]
        first = 0 if row is not None else chosen.randrange(columns)
        num_pages = chosen.choice([0, 1, columns - first]) if row is not None else columns - first
        found.append(Change(slot, first, [chosen.randrange(1 << 20) for _ in range(num_pages)], row))
    return found


def as_packed(changes: list[Change]) -> Tensor:
    """The last change's integers come first, and nothing is where rows of another order would be."""
    fields, rest = [], []
    for change in reversed(changes):
        rest += [-7]
        reset_at = -1 if change.row is None else len(changes) * CHANGE_FIELDS + len(rest)
        rest += change.row or []
        pages_at = len(changes) * CHANGE_FIELDS + len(rest)
        rest += change.pages
        fields.append([change.slot, change.first, len(change.pages), pages_at, reset_at])
    return torch.tensor([value for each in reversed(fields) for value in each] + rest)


def expected_tables(tables: SlotTables, changes: list[Change]) -> SlotTables:
    """Written out, one slot after another."""
    tables = copied(tables)
    for slot, first, pages, row in changes:
        if row is not None:
            ends = [table.shape[1] for table in (tables.rows, tables.added)]
            tables.rows[slot], tables.added[slot] = torch.tensor(row).split(ends)
            tables.page_table[slot] = 0
        for column, page in enumerate(pages, first):
            tables.page_table[slot, column] = page
    return tables


def assert_same_tables(actual: SlotTables, expected: SlotTables) -> None:
    """Every value, of slots without a change too."""
    for name in ("page_table", "rows", "added"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
