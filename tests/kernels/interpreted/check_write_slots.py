"""What slots get, under the interpreter: exact."""

import pytest
from overlap_spec_kernels.window.write_slots import _write_slots_triton
from support.slot_changes import (
    CHANGE_SHAPES,
    Change,
    as_packed,
    assert_same_tables,
    expected_tables,
    random_changes,
    slot_tables,
)


@pytest.mark.parametrize(("count", "columns", "row", "added"), CHANGE_SHAPES)
def test_write_slots(count: int, columns: int, row: int, added: int) -> None:
    tables = slot_tables(count + 3, columns, row, added)
    changes = random_changes(count, tables)
    expected = expected_tables(tables, changes)
    _write_slots_triton(tables, as_packed(changes), count)
    assert_same_tables(tables, expected)


def test_pages_beyond_the_page_table_are_those_of_no_other_slot() -> None:
    tables = slot_tables(2, 3, 1, 2)
    after = tables.page_table[1].tolist()
    _write_slots_triton(tables, as_packed([Change(0, 2, [8, 9], None)]), 1)
    assert tables.page_table[0, 2] == 8 and tables.page_table[1].tolist() == after
