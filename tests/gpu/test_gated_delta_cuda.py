"""Kernels of recurrences on a GPU: the reference's numbers, the bits of single tokens, a graph's and no graph's.

At the sizes of Qwen3-Next (Gated DeltaNet) and of Granite-4.0-H-Small (Mamba-2).
"""

from dataclasses import dataclass

import pytest
import torch
from overlap_spec_kernels.nvrtc import runs_hopper
from overlap_spec_kernels.recurrent import delta_window
from overlap_spec_kernels.recurrent.gated_delta import (
    DeltaRows,
    DeltaState,
    DeltaWeights,
    gated_delta,
    gated_delta_reference,
)
from support.device_watch import compilations
from torch import Tensor

PLACE = torch.device("cuda", 0)
KERNEL, WIDTH, SLOTS = 4, 4, 5


@dataclass(frozen=True)
class Sizes:
    heads: int
    key_heads: int
    key_dim: int
    dim: int
    gates: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.dim

    @property
    def row(self) -> int:
        return self.channels + self.gates * self.heads

    def weights(self) -> DeltaWeights:
        draw = torch.Generator(PLACE).manual_seed(1)

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw, device=PLACE)

        conv, steepness = (
            torch.rand(n, generator=draw, device=PLACE) for n in ((self.channels, KERNEL), (self.heads,))
        )
        offset, norm = drawn(self.heads), drawn(self.dim if self.gates == 2 else self.heads * self.dim)
        more = () if self.gates == 2 else (drawn(self.channels), drawn(self.heads))
        return DeltaWeights(conv - 0.5, steepness, offset, norm, 1e-5, self.key_heads, *more)

    def state(self) -> DeltaState:
        """As a predecessor may have left it: full of NaN."""
        memory = (SLOTS, self.heads, self.key_dim, self.dim)
        sizes = (memory, (SLOTS, KERNEL - 1, self.channels), (SLOTS, WIDTH, self.row))
        parts = (torch.full(size, torch.nan, device=PLACE) for size in sizes)
        return DeltaState(*parts, torch.zeros(SLOTS, dtype=torch.int64, device=PLACE))

    def rows(self, seed: int, count: int) -> Tensor:
        draw = torch.Generator(PLACE).manual_seed(seed)
        return torch.randn(count, self.row + self.heads * self.dim, generator=draw, device=PLACE)


BOTH = [
    pytest.param(Sizes(32, 16, 128, 128, 2), id="gated delta"),
    pytest.param(Sizes(128, 1, 128, 64, 1), id="mamba 2"),
]
pytestmark = pytest.mark.parametrize("sizes", BOTH)


def placed(rows: Tensor, starts: list[int], slots: list[int], are_prompts: bool = False) -> DeltaRows:
    count = len(rows) // len(slots)
    positions = (torch.tensor(starts)[:, None] + torch.arange(count)).flatten().to(PLACE)
    edges = torch.arange(len(slots) + 1, dtype=torch.int32, device=PLACE) * count if are_prompts else None
    return DeltaRows(rows, torch.tensor(slots, device=PLACE), positions, edges, count)


def with_output(rows: DeltaRows, count: int) -> DeltaRows:
    """The last rows of one request are its output."""
    first, end = len(rows.projected) - count, len(rows.projected)
    edges = torch.tensor([0, first, first, end], device=PLACE)
    return rows._replace(row_starts=edges[:2].int(), drawn=edges[2:])


def apart(rows: DeltaRows, sizes: Sizes) -> DeltaRows:
    """Rows whose rates and decays are from a linear of their own."""
    values = sizes.heads * sizes.dim
    mixed, gates, z = rows.projected.split((sizes.channels, sizes.row - sizes.channels, values), dim=1)
    return rows._replace(projected=torch.cat((mixed, z), dim=1), gates=gates.contiguous())


def test_prompts_and_windows(sizes: Sizes) -> None:
    found, expected, weights, other = sizes.state(), sizes.state(), sizes.weights(), sizes.state()
    for forward in (
        placed(sizes.rows(2, 140), [0, 0], [3, 1], are_prompts=True),
        placed(sizes.rows(3, 8), [70, 70], [1, 3]),
        placed(sizes.rows(4, 6), [71, 73], [1, 3]),
        placed(sizes.rows(5, 3), [74], [3]),
    ):
        out = gated_delta(found, weights, forward)
        assert torch.equal(gated_delta(other, weights, apart(forward, sizes)), out)
        torch.testing.assert_close(out, gated_delta_reference(expected, weights, forward), rtol=1e-3, atol=1e-3)
    for one, same, exact in zip(found, other, expected, strict=True):
        torch.testing.assert_close(one, exact, equal_nan=True, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one, same, equal_nan=True, rtol=0, atol=0)


def test_prompts_by_chunks_have_their_bits_however_cut_and_in_any_company(sizes: Sizes) -> None:
    weights, text, found = sizes.weights(), sizes.rows(7, 200), []
    for cuts in ((200,), (64, 200), (128, 192, 200)):
        state, begin, parts = sizes.state(), 0, []
        for end in cuts:
            beside = torch.cat((sizes.rows(end, end - begin), text[begin:end]))
            parts.append(gated_delta(state, weights, placed(beside, [begin, begin], [1, 3], are_prompts=True)))
            begin = end
        found.append((torch.cat([part[len(part) // 2 :] for part in parts]), state.memory[3]))
    expected = sizes.state()
    out = gated_delta_reference(expected, weights, placed(text, [0], [3], are_prompts=True))
    torch.testing.assert_close(found[0][0], out, rtol=1e-3, atol=1e-3)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_near(sizes: Sizes, dtype: torch.dtype) -> None:
    """A prompt of chunks, then windows, then a token again and again; states are kept in float32."""
    weights, found, expected = sizes.weights()._replace(eps=0.1), sizes.state(), sizes.state()
    narrow = weights._replace(conv=weights.conv.to(dtype))
    found = found._replace(inputs=found.inputs.to(dtype), window=found.window.to(dtype))
    again = placed(sizes.rows(13, 1).expand(300, -1).contiguous(), [0], [1], are_prompts=True)
    for forward in (
        placed(sizes.rows(2, 300), [0], [3], are_prompts=True),
        placed(sizes.rows(3, 4), [300], [3]),
        again,
    ):
        out = gated_delta(found, narrow, forward._replace(projected=forward.projected.to(dtype)))
        error = out.float() - gated_delta_reference(expected, weights, forward)
        assert error.pow(2).mean().sqrt() < 0.03, error.abs().max()
    for slot in (1, 3):
        error = found.memory[slot] - expected.memory[slot]
        assert error.norm() < 0.02 * expected.memory[slot].norm()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_windows_have_the_bits_of_single_tokens(sizes: Sizes, captured: bool) -> None:
    weights, text = sizes.weights(), sizes.rows(8, 17)
    plain, drafted = sizes.state(), sizes.state()
    for state, slot in ((plain, 0), (drafted, 2)):
        gated_delta(state, weights, placed(text[:7], [0], [slot], are_prompts=True))
    expected = torch.cat([gated_delta(plain, weights, placed(text[at : at + 1], [at], [0])) for at in range(7, 17)])
    place, graph = placed(sizes.rows(9, WIDTH), [7], [2]), torch.cuda.CUDAGraph()
    scratch = DeltaState(*(part.clone() for part in drafted))
    gated_delta(scratch, weights, place)  # the first launches compile and load
    with torch.cuda.graph(graph):
        captured_out = gated_delta(drafted, weights, place)
    at = 7
    for accepted in (1, 3, 0, 2):
        place.projected.fill_(9.0)  # guesses that are wrong
        place.projected[: accepted + 1] = text[at : at + accepted + 1]
        place.positions.copy_(at + torch.arange(WIDTH))
        if captured:
            graph.replay()
        out = captured_out if captured else gated_delta(drafted, weights, place)
        assert torch.equal(out[: accepted + 1], expected[at - 7 : at - 6 + accepted])
        at += accepted + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_output_that_is_computed_again_has_the_bits_of_windows(sizes: Sizes, dtype: torch.dtype) -> None:
    """Of any number of rows, by the windows' binary, beside which 24 other requests decoded then."""
    weights, count = sizes.weights(), 100
    weights, text = weights._replace(conv=weights.conv.to(dtype)), sizes.rows(8, count).to(dtype)
    plain, again, many = (_in_type(sizes.state(), dtype) for _ in range(3))
    prompt = [
        gated_delta(state, weights, placed(text[:7], [0], [3], are_prompts=True)) for state in (plain, again, many)
    ]
    expected = [gated_delta(plain, weights, placed(text[at : at + 1], [at], [3])) for at in range(7, count)]
    crowd = [
        gated_delta(
            many,
            weights,
            placed(torch.cat((text[at : at + 1].expand(70, -1), text[at : at + 1])), [at] * 71, [1] * 70 + [3]),
        )[-1:]
        for at in range(7, count)
    ]
    found = []
    with compilations() as compiled:
        for begin, end in ((7, 20), (20, count)):
            rows = placed(text[begin:end].contiguous(), [begin], [3], are_prompts=True)
            found.append(gated_delta(again, weights, with_output(rows, end - begin)))
    assert "_recur_kernel" not in compiled
    assert torch.equal(torch.cat(crowd), torch.cat(expected)), "windows of many requests"
    assert torch.equal(torch.cat(found), torch.cat(expected))
    gated_delta(plain, weights, placed(text[:1], [count], [3]))
    assert torch.equal(plain.memory[3], again.memory[3]) and torch.equal(plain.inputs[3], again.inputs[3])
    for _ in range(20):  # a launch that overlaps the prompt's would read what an earlier round has left
        joined = _in_type(sizes.state(), dtype)
        outputs = gated_delta(joined, weights, with_output(placed(text, [0], [3], are_prompts=True), count - 7))
        assert torch.equal(outputs, torch.cat((prompt[0], *expected)))
        few = with_output(placed(text[:20].clone(), [0], [3], are_prompts=True), 13)
        assert torch.equal(gated_delta(_in_type(sizes.state(), dtype), weights, few), outputs[:20])
    assert torch.equal(joined.memory[3], again.memory[3]) and torch.equal(joined.inputs[3], again.inputs[3])


def test_a_graph_has_any_prompt_and_any_output(sizes: Sizes) -> None:
    weights, text, graph, size = sizes.weights(), sizes.rows(8, 150), torch.cuda.CUDAGraph(), 128
    rows = with_output(placed(text[:size].clone(), [0], [3], are_prompts=True), 1)
    captured = sizes.state()
    gated_delta(captured, weights, rows)
    with torch.cuda.graph(graph):
        out = gated_delta(captured, weights, rows)
    assert rows.row_starts is not None and rows.drawn is not None
    for num_prompt, num_output in ((64, 10), (3, 90), (70, 58), (1, 1)):
        end, eager = num_prompt + num_output, sizes.state()
        exact = with_output(placed(text[:end].clone(), [0], [3], are_prompts=True), num_output)
        expected = gated_delta(eager, weights, exact)
        assert exact.row_starts is not None and exact.drawn is not None
        rows.projected[:end] = text[:end]
        rows.row_starts.copy_(exact.row_starts)
        rows.drawn.copy_(exact.drawn)
        graph.replay()
        assert torch.equal(out[:end], expected) and not out[end:].any()
        assert captured.memory[[0, 1, 2, 4]].isnan().all() and captured.position.tolist() == [0, 0, 0, end, 0]
        assert all(torch.equal(one[3], other[3]) for one, other in zip(captured[:2], eager[:2], strict=True))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_one_launch_has_the_bits_of_two(sizes: Sizes, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, of Gated DeltaNet: whatever requests have had accepted, in windows of any width.

    In half of the steps programs have several heads.
    """
    weights, draw, slots = sizes.weights(), torch.Generator().manual_seed(1), [3, 1, 0]
    weights = weights._replace(conv=weights.conv.bfloat16())
    one, two = (_in_type(sizes.state(), torch.bfloat16) for _ in range(2))
    one, two = (state._replace(memory=state.memory.to(stored)) for state in (one, two))
    prompt = placed(sizes.rows(2, 15).bfloat16(), [0] * 3, slots, are_prompts=True)
    assert torch.equal(gated_delta(one, weights, prompt), gated_delta(two, weights, prompt))
    starts, width = torch.full((3,), 5), 0
    for step in range(10):
        starts = starts + torch.randint(0, width + 1, (3,), generator=draw)
        width = step % WIDTH + 1
        rows = placed(sizes.rows(step, 3 * width).bfloat16(), starts.tolist(), slots)
        rows = apart(rows, sizes) if step % 3 else rows
        with compilations() as compiled, monkeypatch.context() as patch:
            patch.setattr(delta_window, "num_multiprocessors", lambda device, few=step % 2: 1 if few else 132)
            found = gated_delta(two, weights, rows)
        assert "_recur_kernel" not in compiled or sizes.gates == 1 or not runs_hopper(PLACE)
        with monkeypatch.context() as patch:
            patch.setattr(delta_window, "takes", lambda *_: False)
            assert torch.equal(found, gated_delta(one, weights, rows)), (step, width)
        for name, left, right in zip(DeltaState._fields, one, two, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True, msg=f"{name} of step {step}")


def _in_type(state: DeltaState, dtype: torch.dtype) -> DeltaState:
    return state._replace(inputs=state.inputs.to(dtype), window=state.window.to(dtype))


def test_plain_and_drafted_steps_run_one_binary(sizes: Sizes) -> None:
    weights, state = sizes.weights(), sizes.state()
    gated_delta(state, weights, placed(sizes.rows(2, 5), [0], [3], are_prompts=True))
    gated_delta(state, weights, placed(sizes.rows(3, 1), [5], [3]))
    with compilations() as compiled:
        for width in (2, 3, WIDTH, 1):
            gated_delta(state, weights, placed(sizes.rows(width, 2 * width), [6, 6], [3, 1]))
    assert not compiled, compiled
    narrow = DeltaState(*(part[:, :1].contiguous() if part is state.window else part for part in state))
    with compilations() as compiled:
        gated_delta(narrow, weights, placed(sizes.rows(9, 1), [7], [3]))  # an engine that only decodes plainly
    assert "_recur_kernel" not in compiled


@pytest.mark.parametrize("are_prompts", [False, True], ids=["windows", "prompts"])
def test_rows_that_begin_at_any_address_have_the_same_bits(sizes: Sizes, are_prompts: bool) -> None:
    """Those of a part of a step, behind other rows."""
    weights, text = sizes.weights(), sizes.rows(6, 3)
    outputs = []
    for offset in (0, 1):
        state = sizes.state()
        gated_delta(state, weights, placed(sizes.rows(2, 5), [0], [3], are_prompts=True))
        place = torch.empty(text.numel() + offset, device=PLACE)[offset:].view_as(text).copy_(text)
        outputs.append(gated_delta(state, weights, placed(place, [5], [3], are_prompts)))
    assert torch.equal(*outputs)
