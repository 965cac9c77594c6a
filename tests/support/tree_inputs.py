"""Seeded random trees in slot rows, and draws on them.

Tokens are few, so that guesses are right by chance; siblings are distinct, as drafts make them. From three rows on, the
last two of a batch are the dummy slot.
"""

from typing import NamedTuple

import torch
from overlap_spec_kernels import Candidates
from torch import Tensor

from support.step_inputs import slot_state

HeadsOfRow = tuple[int, int]  # KV heads and their size

VOCABULARY = 6
# (B, W, N, D): rows, width of the step, columns of the slots' windows, nodes of the longest path
SHAPES = [(1, 1, 1, 1), (1, 4, 4, 4), (3, 2, 5, 2), (3, 5, 8, 3), (7, 10, 10, 4), (33, 16, 16, 6), (5, 64, 64, 9)]
DRAWS = ["by chance", "deepest", "none accepted", "no guesses", "some guesses"]


class TreeState(NamedTuple):
    """What the engine keeps of its slots, the dummy last."""

    length: Tensor  # [S] i64
    window: Tensor  # [S, N] i64
    parents: Tensor  # [S, N] i64
    page_table: Tensor  # [S, P] i32

    def clone(self) -> "TreeState":
        return TreeState(*(tensor.clone() for tensor in self))

    @property
    def dummy(self) -> int:
        return self.length.shape[0] - 1


def tree_state(num_rows: int, columns: int, page_size: int, longest: int = 200) -> TreeState:
    """Slots as `slot_state` makes them, with trees from chains to stars; the dummy's window is at rest."""
    length, window, page_table = slot_state(num_rows, columns, page_size, longest)
    parents = torch.zeros_like(window)
    for slot in range(len(length)):
        window[slot], parents[slot] = random_tree(columns, spread=[1, 2, columns][slot % 3])
    window[-1] = torch.tensor([0] + [-1] * (columns - 1))
    parents[-1] = 0
    return TreeState(length, window, parents, page_table)


def step_slots(state: TreeState, num_rows: int) -> Tensor:
    """Slots of a step, in random order, padded with the dummy."""
    slots = torch.randperm(state.dummy)[:num_rows]
    if num_rows >= 3:
        slots[-2:] = state.dummy
    return slots


def random_tree(columns: int, spread: int) -> tuple[Tensor, Tensor]:
    """Tokens and parents, parents first and siblings distinct. Shapes: -> [N], [N]; parents among `spread` before."""
    tokens, parents = [0], [0]
    for column in range(1, columns):
        free = []
        while not free:  # a node of every token has no room for another child
            parent = int(torch.randint(max(column - spread, 0), column, ()))
            used = {token for token, above in zip(tokens[1:], parents[1:], strict=True) if above == parent}
            free = [token for token in range(VOCABULARY) if token not in used]
            spread += not free
        tokens.append(free[int(torch.randint(len(free), ()))])
        parents.append(parent)
    return torch.tensor(tokens), torch.tensor(parents)


def draws(kind: str, window: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """A window to judge and what the target draws after its columns. Shapes: [B, W] i64 -> twice [B, W]."""
    num_rows, width = window.shape
    window, drawn = window.clone(), torch.randint(0, VOCABULARY, window.shape)
    if kind == "deepest":  # every node's last child; the target agrees with some path to the bottom
        for column in range(1, width):
            drawn.scatter_(1, parents[:, column, None], window[:, column, None])
    elif kind == "none accepted":
        drawn.fill_(VOCABULARY)
    elif kind == "no guesses":
        window[:, 1:] = -1
    elif kind == "some guesses":  # a prefix of the columns is a tree
        window[torch.arange(width) > torch.randint(0, width, (num_rows, 1))] = -1
    return window, drawn


def earlier_columns(num_guesses: int, num_rows: int) -> Tensor:
    """A parent for each guess: window columns before its own. Shapes: -> [K, B] i64."""
    return (torch.rand(num_guesses, num_rows) * torch.arange(1, num_guesses + 1)[:, None]).long()


def random_caches(
    num_layers: int, num_pages: int, page_size: int, heads: HeadsOfRow, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of all layers."""
    size = (num_layers, num_pages, page_size, *heads)
    return torch.randn(size).to(dtype), torch.randn(size).to(dtype)


def moves(num_requests: int, depth: int, num_pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Sources and targets as verdicts make them: rows move down, over each other, or stay. Shapes: -> twice [B, D]."""
    pages = torch.randperm(num_pages)[: num_pages // num_requests * num_requests].view(num_requests, -1)
    width = pages.shape[1] * page_size
    paths = []
    for _ in range(num_requests):
        walked = int(torch.randint(0, depth, ()))
        below = torch.randperm(width - 1)[:walked].sort().values + 1
        paths.append(torch.cat((torch.zeros(1, dtype=torch.int64), below, torch.arange(walked + 1, depth))))
    places = torch.stack((torch.stack(paths), torch.arange(depth).expand(num_requests, depth)))
    rows = pages.gather(1, places.transpose(0, 1).flatten(1) // page_size).view(num_requests, 2, depth)
    source, target = (rows * page_size + places.transpose(0, 1) % page_size).unbind(1)
    return source.contiguous(), target.contiguous()


def tied_logits(num_rows: int, size: int) -> Tensor:
    """Few values, so that many are equal; -0 among them, and -inf. Shapes: -> [R, V] f32."""
    logits = torch.randint(-6, 4, (num_rows, size)).float() / 2
    logits[:, ::3] *= -0.5
    logits[1::2, size // 2 :] = -torch.inf
    logits[0, 2:] = -torch.inf
    return logits


def candidate_trees(num_rows: int, topk: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, tokens and parents as EAGLE-2 draws them, many scores equal. Shapes: -> thrice [B, C]."""
    scores, parents = torch.zeros(num_rows, 0), torch.zeros(num_rows, 0, dtype=torch.int64)
    nodes = torch.full((num_rows, 1), -1)
    for _ in range(levels):
        first = scores.shape[1]
        above = nodes.repeat_interleave(topk, 1)
        value = torch.where(above < 0, 0.0, scores.gather(1, above.clamp(min=0)) if first else 0.0)
        scores = torch.cat((scores, value - torch.randint(0, 3, above.shape) / 4), 1)
        parents = torch.cat((parents, above), 1)
        nodes = torch.sort(scores[:, first:], dim=1, descending=True, stable=True).indices[:, :topk] + first
    scores[1::2] = torch.where(scores[1::2] < -0.8, -torch.inf, scores[1::2])  # and so are all below them
    return scores, torch.randint(0, 1000, scores.shape), parents


def random_logs(levels: int, num_rows: int, topk: int) -> Tensor:
    """Log-probabilities of the best tokens of each level. Shapes: -> [L, B, k] f64."""
    return torch.randn(levels, num_rows, 50, dtype=torch.float64).mul(2).log_softmax(2).topk(topk).values


def tied_logs(levels: int, num_rows: int, topk: int) -> Tensor:
    """The same, of few values, so that many sums are equal; 0 and -inf among them. Shapes: -> [L, B, k] f32."""
    logs = -torch.randint(0, 6, (levels, num_rows, topk)).float().sort(2).values / 4
    logs[:, 1::2, topk // 2 + 1 :] = -torch.inf
    return logs


class ChildInputs(NamedTuple):
    """Arguments of `add_children`, in its order."""

    candidates: Candidates
    first: int
    logs: Tensor
    columns: Tensor
    ids: Tensor
    log_probs: Tensor
    index: Tensor


def child_inputs(num_rows: int, num_nodes: int, num_children: int, dtype: torch.dtype = torch.float32) -> ChildInputs:
    """Into the middle of candidates that hold something. `dtype`: of the children's log_probs."""
    candidates = Candidates(*(torch.full((num_rows, num_nodes * num_children + 7), -9) for _ in range(3)))
    size = (num_rows, num_nodes, num_children)
    logs = -torch.rand(size)
    logs[torch.rand(size) < 0.2] = -torch.inf
    return ChildInputs(
        candidates._replace(log_probs=candidates.log_probs.to(dtype)),
        4,
        logs.to(dtype),
        torch.randint(0, 50, size),
        torch.randint(0, 1000, (50,)),
        -torch.rand(num_rows, num_nodes),
        torch.randint(-1, 4, (num_rows, num_nodes)),
    )


class LevelInputs(NamedTuple):
    """Arguments of `expand_tree`, in its order, but the last."""

    log_probs: Tensor
    tokens: Tensor
    mask: Tensor
    features: Tensor
    own_bits: Tensor

    def worth_in(self, dtype: torch.dtype) -> Tensor:
        """The same values, as columns of something wider."""
        return torch.empty_strided(self.log_probs.shape, self.log_probs.stride(), dtype=dtype).copy_(self.log_probs)


def level_inputs(num_rows: int, num_nodes: int, topk: int, size: int, num_words: int = 1) -> LevelInputs:
    """Each node has topk children, and as many go on; many have equal log_probs, and some -inf."""
    log_probs = torch.randint(-5, 1, (num_rows, num_nodes * topk + 2)) / 4
    log_probs[torch.rand(log_probs.shape) < 0.2] = -torch.inf
    tokens = torch.randint(0, 1000, log_probs.shape)
    log_probs, tokens = log_probs[:, 1:-1], tokens[:, 1:-1]  # columns of something wider
    words = torch.randint(-(1 << 62), 1 << 62, (num_rows, num_nodes, num_words))
    own_bits = torch.randint(-(1 << 62), 1 << 62, (topk, num_words))
    features = torch.randn(num_rows * num_nodes, size + 3)[:, :size]  # rows of something wider
    return LevelInputs(log_probs, tokens, words, features, own_bits)
