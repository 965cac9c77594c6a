"""In which order linears in 16 bits add up K on a Hopper, by the number of rows: as kernels/README.md has it.

A choice by the number of rows that is new, or gone, is seen here without a GPU.
"""

from pathlib import Path

import pytest
import torch
from overlap_spec_kernels import Norm, Normed
from overlap_spec_kernels.linear import ordered
from overlap_spec_kernels.linear.call import Call
from support.orders_of_sums import (
    BLAS,
    IN_ORDER,
    SHAPES,
    classes,
    order_of,
    order_of_rows_in_8_bits,
    order_with_the_flag,
)

COUNTS = range(1, 129)
README = Path(__file__).parents[2] / "kernels/overlap_spec_kernels/README.md"
BEGINS = {  # by model and linear, the numbers of rows with which another order begins
    ("SmolLM2", "qkv"): [1, 3, 17, 65],
    ("SmolLM2", "output"): [1, 3, 17, 65],
    ("SmolLM2", "gate, up"): [1, 17, 65],
    ("SmolLM2", "down"): [1, 65],
    ("SmolLM2", "head"): [1, 65],
    ("1B", "qkv"): [1, 9, 33, 65],
    ("1B", "output"): [1, 9, 33, 65],
    ("1B", "gate, up"): [1, 9],
    ("1B", "down"): [1, 9, 33, 65],
    ("1B", "head"): [1, 9, 65],
    ("8B", "qkv"): [1, 9, 65],
    ("8B", "output"): [1, 9, 33, 65],
    ("8B", "gate, up"): [1, 9],
    ("8B", "down"): [1, 9, 33, 65],
    ("8B", "head"): [1, 9, 65],
}


@pytest.mark.parametrize(("model", "linear"), BEGINS, ids=str)
def test_where_another_order_begins(model: str, linear: str) -> None:
    found = classes(COUNTS, *SHAPES[model][linear])
    assert [begin for begin, _ in found] == BEGINS[model, linear], found


def test_the_table_is_that_of_the_documents() -> None:
    lines = README.read_text().splitlines()
    for model, linears in SHAPES.items():
        for linear in linears:
            begins = ", ".join(map(str, BEGINS[model, linear]))
            assert any(line.startswith(f"| {model} | {linear} | {begins} |") for line in lines), (model, linear)


def test_known_orders() -> None:
    """Of the 8B's output: four sums side by side, then two halves, then one sum; a BLAS from 65 rows on."""
    shape = SHAPES["8B"]["output"]
    orders = [order_of(count, *shape) for count in (8, 32, 64, 65)]
    assert orders[0].endswith("4 sums added")
    assert orders[1:] == ["2 parts of 2048 columns, added in their order", IN_ORDER, BLAS]


def test_many_rows_have_the_pieces_and_norms_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small weights of more than 128 columns."""
    seen: list[tuple[int, bool, bool]] = []

    def noted(call: Call, piece: int) -> None:
        seen.append((piece, call.squares is not None, call.residual is not None))

    monkeypatch.setattr(ordered, "runs_triton", lambda _: True)
    monkeypatch.setattr(ordered, "run_tiles", noted)
    for size_k in (576, 1536, 128):
        x, weight = (torch.empty(rows, size_k, dtype=torch.bfloat16, device="meta") for rows in (512, 576))
        residual, norm = torch.empty(512, 576, dtype=x.dtype, device="meta"), Norm(weight.new_empty(576), 0.1)
        operand, of_x = ordered.OrderedWeight(weight), Normed(x, x, torch.empty(36, 512, device="meta"), 0.1)
        if size_k > 128:
            operand.product(of_x)
            operand.add(x, residual, norm)
        else:
            operand.product(x)
    assert seen == [(32, True, False), (32, False, True), (64, True, False), (64, False, True), (0, False, False)]


@pytest.mark.parametrize("linear", SHAPES["8B"])
@pytest.mark.parametrize("model", SHAPES)
def test_with_the_flag_there_is_one_order(model: str, linear: str) -> None:
    """For --enable-deterministic-inference the tiles follow the rows, and what K is divided into the weight."""
    shape = SHAPES[model][linear]
    found = {order_with_the_flag(count, *shape) for count in (*COUNTS, 256, 1024, 8192)}
    assert len(found) == 1 and (found == {IN_ORDER}) == (model != "SmolLM2" or linear == "head"), found
    assert len({order_of_rows_in_8_bits(count, *shape) for count in (*COUNTS, 129, 256, 700, 1024, 8192)}) == 1
