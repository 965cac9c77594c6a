"""The references of the ops on trees of guesses, against definitions written out one row at a time."""

import itertools

import pytest
import torch
from kernel_cases.inputs import HeadShape, TreeInputs, tree_inputs
from overlap_spec_kernels import (
    add_children,
    expand_tree,
    gather_tree,
    judge_tree,
    marginal_tree,
    move_cache_rows,
    place_tree,
    select_tree,
    top_tokens,
    tree_attention,
)
from support.reference.trees import marginal_nodes
from support.step_inputs import step_limits, stored, token_rows
from support.tree_inputs import (
    DRAWS,
    SHAPES,
    VOCABULARY,
    candidate_trees,
    child_inputs,
    draws,
    earlier_columns,
    level_inputs,
    moves,
    random_caches,
    random_logs,
    step_slots,
    tied_logits,
    tied_logs,
    tree_state,
)
from torch import Tensor

every_shape = pytest.mark.parametrize("num_rows, width, columns, depth", SHAPES)


def ancestors(parents: list[int], column: int) -> list[int]:
    """From a column up to the root, both included."""
    path = [column]
    while path[-1]:
        path.append(parents[path[-1]])
    return path


def dense_attention(inputs: TreeInputs, window: int | None, sinks: Tensor | None = None) -> Tensor:
    """One row and one head at a time, keys gathered one by one."""
    page_size, num_kv_heads = inputs.k_cache.shape[1:3]
    num_requests, width, _ = inputs.mask.shape
    group = inputs.q.shape[1] // num_kv_heads
    out = torch.zeros_like(inputs.q)
    for row in range(num_requests * width):
        request, position = row // width, int(inputs.positions[row])
        words = inputs.mask[request, row % width].tolist()
        places = [place for place in range(int(inputs.prefix[request])) if not window or position - place < window]
        rows = [int(inputs.page_table[request, place // page_size]) * page_size + place % page_size for place in places]
        rows += [
            int(cache_row)
            for extra, cache_row in enumerate(inputs.extra_rows[request])
            if words[extra // 64] >> extra % 64 & 1
        ]
        for head in range(inputs.q.shape[1] if rows else 0):
            k, v = (cache.flatten(0, 1)[rows, head // group] for cache in (inputs.k_cache, inputs.v_cache))
            scores = k @ inputs.q[row, head] * inputs.scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[head, None]))
            out[row, head] = torch.softmax(scores, dim=0)[: len(v)] @ v
    return out


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 1, 9, 30])
@pytest.mark.parametrize(("width", "num_extra"), [(1, 1), (5, 9), (16, 16), (3, 130)])
def test_tree_attention(width: int, num_extra: int, window: int | None, page_size: int) -> None:
    """NaN lies in pages of nobody, and in extra keys that nobody sees; the last row of a request sees no extra key."""
    inputs = tree_inputs(HeadShape(6, 2, 8), width, num_extra, [37, 0, 14], page_size, torch.float64)
    expected = dense_attention(inputs, window)
    torch.testing.assert_close(tree_attention(*inputs, window), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [None, 9])
def test_tree_attention_with_sinks(window: int | None) -> None:
    inputs = tree_inputs(HeadShape(6, 2, 8), 5, 9, [37, 0, 14], 16, torch.float64)
    sinks = torch.linspace(-2, 3, 6, dtype=torch.float64)
    expected = dense_attention(inputs, window, sinks)
    torch.testing.assert_close(tree_attention(*inputs, window, sinks=sinks), expected, rtol=1e-12, atol=1e-13)


@every_shape
def test_gather_tree(num_rows: int, width: int, columns: int, depth: int) -> None:
    state = tree_state(num_rows, columns, page_size=16)
    state.window[::2, columns // 2 + 1 :] = -1
    slots = step_slots(state, num_rows)
    gathered = gather_tree(slots, *state, width, 16)
    for row, slot in enumerate(slots.tolist()):
        length, window, parents = (int(state.length[slot]), *(t[slot, :width].tolist() for t in state[1:3]))
        part = slice(row * width, (row + 1) * width)
        paths = [ancestors(parents, column) for column in range(width)]
        pages = state.page_table[slot].tolist()
        places = range(length, length + width)
        assert gathered.window_tokens[row].tolist() == window
        assert gathered.parents[row].tolist() == parents
        assert gathered.tokens[part].tolist() == [max(token, 0) for token in window]
        assert gathered.positions[part].tolist() == [length + len(path) - 1 for path in paths]
        assert gathered.lengths[row] == length
        assert gathered.num_proposed[row] == sum(token >= 0 for token in window[1:])
        assert gathered.extra_rows[row].tolist() == [pages[place // 16] * 16 + place % 16 for place in places]
        words = [word % 2**64 for word in gathered.mask[row, :, 0].tolist()]
        assert words == [sum(1 << node for node in path) for path in paths]
        assert gathered.page_table[row].tolist() == pages


@pytest.mark.slow_but_every(3)
@every_shape
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("given", [False, True])
def test_judge_tree(given: bool, kind: str, num_rows: int, width: int, columns: int, depth: int) -> None:
    state = tree_state(num_rows, columns, page_size=16)
    before = state.clone()
    slots = step_slots(state, num_rows)
    parents, lengths = state.parents[slots, :width], state.length[slots]
    window_tokens, drawn_tokens = draws(kind, state.window[slots, :width], parents)
    wanted = torch.randint(0, depth + 1, (num_rows,)) if given else None
    judged = judge_tree(
        drawn_tokens, window_tokens, parents, slots, lengths, state.length, state.window, state.dummy, depth, wanted,
        store := token_rows(slots, state),
    )  # fmt: skip
    for row, slot in enumerate(slots.tolist()):
        drawn, guesses, above = (t[row].tolist() for t in (drawn_tokens, window_tokens, parents))
        most = depth - 1 if wanted is None else min(int(wanted[row]), depth - 1)
        path = walked(drawn, guesses, above, most, given)
        accepted = len(path) - 1
        tokens = [guesses[column] for column in path[1:]] + [drawn[path[-1]]]
        tokens += [-1] * (depth - 1 - accepted)
        depths = [len(ancestors(above, column)) - 1 for column in range(1, width) if guesses[column] >= 0]
        length = int(lengths[row]) + accepted + 1
        assert judged.tokens[row].tolist() == tokens
        assert judged.follow.view(-1, depth)[row].tolist() == [max(token, 0) for token in tokens]
        assert judged.path[row].tolist() == path + list(range(len(path), depth))
        assert judged.accept_len[row] == accepted
        assert judged.next_positions[:, row].tolist() == list(range(length, length + depth))
        published = judged.published
        last = max((column for column in range(1, width) if guesses[column] >= 0), default=0)
        assert published.tokens[row].tolist() == tokens
        assert published.num_guesses[row] == min(max(depths, default=0), depth - 1)
        assert published.last_guess[row] == last
        assert published.path[row].tolist() == path[1:] + [-1] * (depth - len(path))
        is_dummy = slot == state.dummy
        if not is_dummy:
            assert stored(store, row, int(lengths[row]), depth) == tokens
        assert state.length[slot] == (0 if is_dummy else length)
        assert state.window[slot].tolist() == [0 if is_dummy else drawn[path[-1]], *[-1] * (columns - 1)]
    others = [slot for slot in range(state.dummy) if slot not in slots.tolist()]
    assert torch.equal(state.length[others], before.length[others])
    assert torch.equal(state.window[others], before.window[others])


@pytest.mark.parametrize("kind", DRAWS)
def test_a_path_says_what_narrower_windows_would_have_committed(kind: str) -> None:
    num_rows, width, depth = 33, 16, 6
    state = tree_state(num_rows, width, page_size=16)
    slots = step_slots(state, num_rows)
    parents = state.parents[slots]
    window_tokens, drawn = draws(kind, state.window[slots], parents)

    def judged(columns: int) -> tuple[list[int], list[list[int]]]:
        """Guesses that are accepted, and published paths."""
        first = [tensor[:, :columns].contiguous() for tensor in (drawn, window_tokens, parents)]
        rows = slots, state.length[slots], state.length.clone(), state.window.clone(), state.dummy
        verdict = judge_tree(*first, *rows, min(depth, columns))
        return verdict.accept_len.tolist(), verdict.published.path.tolist()

    for path, *narrower in zip(judged(width)[1], *(judged(columns)[0] for columns in range(1, width)), strict=True):
        assert narrower == [sum(0 <= column < columns for column in path) for columns in range(1, width)]


def walked(drawn: list[int], guesses: list[int], parents: list[int], most: int, given: bool) -> list[int]:
    """Columns from the root down: to the child that was drawn, or, if given, to the first."""
    path = [0]
    while len(path) <= most:
        children = [c for c in range(1, len(guesses)) if parents[c] == path[-1] and guesses[c] >= 0]
        children = [c for c in children if given or guesses[c] == drawn[path[-1]]]
        if not children:
            break
        path.append(children[0])
    return path


@pytest.mark.parametrize("num_guesses", [1, 2, 4])
def test_place_tree_leaves_no_guess_of_an_earlier_step(num_guesses: int) -> None:
    state = tree_state(7, 5, page_size=16)
    before, slots = state.clone(), step_slots(state, 7)
    guesses = torch.randint(-1, VOCABULARY, (num_guesses, 7))
    parents, most_steps = earlier_columns(num_guesses, 7), step_limits(state, 4)
    place_tree(state.window, state.parents, slots, guesses, parents, most_steps, state.dummy)
    placed = {slot: row for row, slot in enumerate(slots.tolist()) if slot != state.dummy}
    for slot, (window, above) in enumerate(zip(state.window.tolist(), state.parents.tolist(), strict=True)):
        row, empty = placed.get(slot), 4 - num_guesses
        old = before.window[slot].tolist(), before.parents[slot].tolist()
        if row is None:
            assert (window, above) == old
        else:
            kept = [level_of(column, parents[:, row]) <= most_steps[slot] for column in range(1, num_guesses + 1)]
            tokens = [token if keeps else -1 for token, keeps in zip(guesses[:, row].tolist(), kept, strict=True)]
            columns = [column if keeps else 0 for column, keeps in zip(parents[:, row].tolist(), kept, strict=True)]
            assert window == [old[0][0], *tokens, *[-1] * empty]
            assert above == [old[1][0], *columns, *[0] * empty]


def level_of(column: int, parents: torch.Tensor) -> int:
    """Edges from a window column up to the root."""
    return 0 if column == 0 else 1 + level_of(int(parents[column - 1]), parents)


def test_move_cache_rows_reads_before_it_writes() -> None:
    k, v = random_caches(num_layers=3, num_pages=12, page_size=4, heads=(2, 3), dtype=torch.float32)
    source, target = moves(num_requests=4, depth=5, num_pages=12, page_size=4)
    expected = k.clone(), v.clone()
    for old, new in zip(source.flatten().tolist(), target.flatten().tolist(), strict=True):
        for cache, moved in zip((k, v), expected, strict=True):
            moved[:, new // 4, new % 4] = cache[:, old // 4, old % 4]
    move_cache_rows(k, v, source, target)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


@pytest.mark.parametrize("k", [1, 4, 20])
@pytest.mark.parametrize("size", [20, 100, 3000])
def test_top_tokens(size: int, k: int) -> None:
    """Ties, also of the smallest that is taken, go to the lower column, and so does -inf."""
    logits = tied_logits(5, size)
    top = top_tokens(logits, k)
    logs = torch.log_softmax(logits.double(), dim=1)
    for row, values in enumerate(logits.tolist()):
        columns = sorted(range(size), key=lambda column: (-values[column], column))[:k]
        assert top.columns[row].tolist() == columns
        torch.testing.assert_close(top.log_probs[row].double(), logs[row, columns], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("topk", "levels", "num_guesses"), [(1, 3, 3), (2, 1, 1), (3, 4, 9), (8, 5, 31), (4, 2, 20)])
def test_select_tree(topk: int, levels: int, num_guesses: int) -> None:
    scores, tokens, parents = candidate_trees(6, topk, levels)
    guesses, columns = select_tree(scores, tokens, parents, num_guesses)
    for row, values in enumerate(scores.tolist()):
        best = sorted(range(len(values)), key=lambda index: (-values[index], index))[:num_guesses]
        wanted = [int(tokens[row, index]) if values[index] > -torch.inf else -1 for index in best]
        assert guesses[:, row].tolist() == wanted
        above = [int(parents[row, index]) for index in best]
        assert columns[:, row].tolist() == [best.index(index) + 1 if index >= 0 else 0 for index in above]
        assert all(column <= i for i, column in enumerate(columns[:, row].tolist())), "parents first"


@pytest.mark.parametrize(
    ("levels", "topk", "num_guesses"), [(1, 1, 1), (1, 4, 4), (7, 1, 7), (3, 2, 9), (7, 4, 15), (8, 16, 63)]
)
def test_marginal_tree(levels: int, topk: int, num_guesses: int) -> None:
    """The nodes of the heap written out, of ties too, and the best of all paths there are."""
    for logs in (tied_logs(levels, 5, topk), random_logs(levels, 5, topk)):
        columns = torch.rand(levels, 5, 50).argsort(2)[:, :, :topk].contiguous()
        ids = torch.randperm(50)
        guesses, parents = marginal_tree(logs, columns, ids, num_guesses)
        for row in range(5):
            tokens = ids[columns[:, row]].tolist()
            pairs = [list(zip(*level, strict=True)) for level in zip(logs[:, row].tolist(), tokens, strict=True)]
            wanted = marginal_nodes(pairs, num_guesses)
            count = len(wanted[0])
            assert (guesses[:count, row].tolist(), parents[:count, row].tolist()) == wanted
            assert (guesses[count:, row] == -1).all() and (parents[count:, row] == 0).all()
            if levels * topk <= 28:
                found = sums_of(pairs, *wanted)
                assert found == pytest.approx(best_sums(pairs)[: len(found)], abs=1e-12)


def sums_of(pairs: list[list[tuple[float, int]]], tokens: list[int], parents: list[int]) -> list[float]:
    """Of logs along the path to each node, node by node."""
    sums, depths = [0.0], [0]
    for token, parent in zip(tokens, parents, strict=True):
        sums.append(sums[parent] + next(log for log, of in pairs[depths[parent]] if of == token))
        depths.append(depths[parent] + 1)
    return sums[1:]


def best_sums(pairs: list[list[tuple[float, int]]]) -> list[float]:
    """Of every path through the levels, best first."""
    every = [[0.0]]
    for level in pairs:
        every.append([above + log for above in every[-1] for log, _ in level])
    return sorted(itertools.chain(*every[1:]), reverse=True)


def test_what_is_not_there_is_no_node_of_a_marginal_tree() -> None:
    """Filters drop tokens, and a tree may have fewer nodes than are asked for."""
    logs = torch.tensor([[[-1.0, -2.0, -torch.inf]], [[-0.5, -torch.inf, -torch.inf]]])
    columns = torch.arange(3).expand(2, 1, 3).contiguous()
    guesses, parents = marginal_tree(logs, columns, torch.arange(3) + 10, 7)
    assert guesses[:, 0].tolist() == [10, 10, 11, 10, -1, -1, -1]
    assert parents[:, 0].tolist() == [0, 1, 0, 3, 0, 0, 0]
    with pytest.raises(ValueError, match="num_guesses"):
        marginal_tree(logs, columns, torch.arange(3), 64)


def test_add_children() -> None:
    inputs = child_inputs(num_rows=3, num_nodes=2, num_children=4)
    add_children(*inputs)
    candidates = inputs.candidates
    for row in range(3):
        for child in range(8):
            node, of_node = divmod(child, 4)
            assert candidates.log_probs[row, 4 + child] == inputs.log_probs[row, node] + inputs.logs[row, node, of_node]
            assert candidates.tokens[row, 4 + child] == inputs.ids[inputs.columns[row, node, of_node]]
            assert candidates.parents[row, 4 + child] == inputs.index[row, node]
    assert all((part[:, [0, 1, 2, 3, -3, -2, -1]] == -9).all() for part in candidates), "others are left alone"


@pytest.mark.parametrize(("num_nodes", "topk", "num_words"), [(1, 1, 1), (1, 4, 1), (3, 3, 2), (8, 8, 1)])
def test_expand_tree(num_nodes: int, topk: int, num_words: int) -> None:
    inputs = level_inputs(5, num_nodes, topk, 6, num_words)
    level = expand_tree(*inputs, first=11)
    for row, values in enumerate(inputs.log_probs.tolist()):
        order = sorted(range(len(values)), key=lambda index: (-values[index], index))[:topk]
        parents, part = [index // topk for index in order], slice(row * topk, (row + 1) * topk)
        assert level.indices[row].tolist() == [index + 11 for index in order]
        assert level.log_probs[row].tolist() == [values[index] for index in order]
        assert level.tokens[part].tolist() == inputs.tokens[row, order].tolist()
        assert torch.equal(level.mask[row], inputs.mask[row, parents] | inputs.own_bits)
        assert torch.equal(level.features[part], inputs.features.view(5, num_nodes, 6)[row, parents])


@pytest.mark.parametrize("argument", ["prefix", "extra_rows", "mask", "positions", "page_table", "v_cache"])
def test_a_bad_argument_is_named(argument: str) -> None:
    arguments = tree_inputs(HeadShape(2, 1, 8), 3, 4, [5], 16, torch.float32)._asdict()
    arguments[argument] = torch.zeros(2, 9)
    with pytest.raises(ValueError, match=f"^{argument}: "):
        tree_attention(**arguments)
