"""What slots get on a GPU, against definitions written out one slot at a time."""

import pytest
import torch
from overlap_spec_kernels import gather_window, write_slots
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.slot_changes import (
    CHANGE_SHAPES,
    as_packed,
    assert_same_tables,
    copied,
    expected_tables,
    random_changes,
    slot_tables,
)


@sync_mode_warns
@pytest.mark.parametrize(("count", "columns", "row", "added"), [*CHANGE_SHAPES, (250, 600, 72, 25)])
def test_write_slots(count: int, columns: int, row: int, added: int) -> None:
    tables = slot_tables(count + 3, columns, row, added)
    changes = random_changes(count, tables)
    expected, moved = expected_tables(tables, changes), copied(tables, "cuda")
    on_device = as_packed(changes).cuda()
    write_slots(moved, on_device, count)  # compiles
    assert_same_tables(moved, expected)
    moved = copied(tables, "cuda")
    with synchronization_is_an_error():
        write_slots(moved, on_device, count)
    assert_same_tables(moved, expected)


def test_a_kernel_that_begins_early_sees_the_new_pages() -> None:
    tables = slot_tables(64, 500, 72, 25)
    length, window = torch.full((64,), 7000).cuda(), torch.zeros(64, 4, dtype=torch.int64).cuda()
    moved, slots = copied(tables, "cuda"), torch.arange(64).cuda()
    for _ in range(20):
        changes = random_changes(60, tables)
        tables = expected_tables(tables, changes)
        packed_pinned = as_packed(changes).pin_memory()
        write_slots(moved, packed_pinned.to("cuda", non_blocking=True), 60)
        gathered = gather_window(slots, length, window, moved.page_table, 4, 16)
        assert torch.equal(gathered.page_table[:, :437].cpu(), tables.page_table[:, :437])
