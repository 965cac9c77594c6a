"""What slots get, against definitions written out one slot at a time; the kernel compiles for Hopper."""

import pytest
import torch
from overlap_spec_kernels import CHANGE_FIELDS, SlotTables, write_slots
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
def test_the_reference_writes_what_changes_say(count: int, columns: int, row: int, added: int) -> None:
    tables = slot_tables(count + 3, columns, row, added)
    changes = random_changes(count, tables)
    expected = expected_tables(tables, changes)
    write_slots(tables, as_packed(changes), count)
    assert_same_tables(tables, expected)


def test_a_new_request_sees_no_page_of_the_one_before() -> None:
    tables = slot_tables(2, 6, 3, 2)
    write_slots(tables, as_packed([Change(1, 0, [4, 5], [1, 2, 3, 4, 5])]), 1)
    write_slots(tables, as_packed([Change(1, 2, [6, 7, 8, 9], None)]), 1)
    assert tables.page_table[1].tolist() == [4, 5, 6, 7, 8, 9]
    write_slots(tables, as_packed([Change(1, 0, [3], [5, 4, 3, 2, 1])]), 1)
    assert tables.page_table[1].tolist() == [3, 0, 0, 0, 0, 0]
    assert (tables.rows[1].tolist(), tables.added[1].tolist()) == ([5, 4, 3], [2, 1])


def test_pages_beyond_the_page_table_are_those_of_no_other_slot() -> None:
    tables = slot_tables(2, 3, 1, 2)
    after = tables.page_table[1].tolist()
    write_slots(tables, as_packed([Change(0, 2, [8, 9], None)]), 1)
    assert tables.page_table[0, 2] == 8 and tables.page_table[1].tolist() == after


def test_wrong_arguments_are_named() -> None:
    tables, changes = slot_tables(2, 3, 1, 2), torch.zeros(CHANGE_FIELDS, dtype=torch.int64)
    for count in (0, 2):
        with pytest.raises(ValueError, match="count"):
            write_slots(tables, changes, count)
    with pytest.raises(ValueError, match="changes"):
        write_slots(tables, changes.int(), 1)
    with pytest.raises(ValueError, match="page_table"):
        SlotTables(tables.rows, tables.rows, tables.added)
    with pytest.raises(ValueError, match="added"):
        SlotTables(tables.page_table, tables.rows, tables.added[:1])


def test_the_kernel_compiles_for_hopper() -> None:
    triton = pytest.importorskip("triton", reason="Triton's wheels are for Linux: pip install triton")
    from overlap_spec_kernels.window.write_slots import _write_slots_kernel

    function = _write_slots_kernel.compiled
    constants = {"FIELDS": 5, "ROW": 72, "ADDED": 25, "BLOCK_R": 128, "BLOCK_P": 1024, "PDL": True}
    types = {"page_table_ptr": "*i32", "num_columns": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*i64") for name in function.arg_names}
    by_place = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(function, signature, by_place)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"]
    assert "griddepcontrol.wait" in ptx and ".local" not in ptx
