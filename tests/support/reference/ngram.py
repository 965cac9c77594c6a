"""NGRAM's guesses written out in plain Python, with dicts and lists.

What follows earlier occurrences of the last tokens is merged into a trie, match after match, in the order of
rank: the longest first, own ones before others', later ones before earlier ones.
"""

from dataclasses import dataclass, field

OWN = 16  # matches of a request with itself, at most


@dataclass(frozen=True)
class Limits:
    """As `NgramLimits`."""

    min_match: int = 1
    max_match: int = 12
    branch: int = 18
    min_breadth: int = 1
    max_breadth: int = 10
    by_frequency: bool = False

    def sizes(self) -> list[int]:
        """Lengths of the n-grams that are looked up among the tokens of all requests."""
        between = [size for size in (2, 4, 8, 16) if self.min_match < size < self.max_match]
        return sorted({self.min_match, *between, self.max_match})


@dataclass
class Match:
    """An earlier occurrence of the last `length` tokens, and what followed it."""

    length: int
    following: list[int]


@dataclass
class Node:
    """A guess. `rank`: of the first match that leads to it."""

    token: int
    depth: int
    rank: int
    length: int  # of that match
    weight: int = 0
    probability: int = 1 << 20
    kept: bool = True
    parent: "Node | None" = None
    children: "dict[int, Node]" = field(default_factory=dict)


def matched(tokens: list[int], place: int, last: list[int], most: int) -> int:
    """How many tokens agree, read backwards from a place and from the end of `last`."""
    length = 0
    while length < min(most, place + 1, len(last)) and tokens[place - length] == last[-1 - length]:
        length += 1
    return length


def own_matches(tokens: list[int], limits: Limits, num_levels: int) -> list[Match]:
    """With the request's own tokens. What follows goes round where the end is near."""
    end, found = len(tokens) - 1, []
    for place in range(end):
        length = matched(tokens, place, tokens, limits.max_match)
        if length >= limits.min_match:
            found.append((length, place))
    found.sort(reverse=True)
    return [
        Match(length, [tokens[place + 1 + i % (end - place)] for i in range(num_levels)])
        for length, place in found[:OWN]
    ]


def shared_matches(said: list[list[int]], tokens: list[int], limits: Limits, num_levels: int) -> list[Match]:
    """With the tokens of all requests, the latest last, `tokens` themselves among them: the latest of each size."""
    places = set()
    for size in limits.sizes():
        latest = [
            (number, place)
            for number, other in enumerate(said)
            for place in range(size - 1, len(other) - 1)
            if len(tokens) >= size and other[place - size + 1 : place + 1] == tokens[len(tokens) - size :]
        ]
        places |= {max(latest)} if latest else set()
    found = [(matched(said[n], place, tokens, limits.max_match), n, place) for n, place in places]
    found.sort(reverse=True)
    return [Match(length, said[n][place + 1 :][:num_levels]) for length, n, place in found]


def guess(
    tokens: list[int], said: list[list[int]], limits: Limits, num_guesses: int
) -> tuple[list[int], list[int], int]:
    """(tokens, parents, tokens of the longest match): of the best guesses, parents as window columns, 0 the root.

    `tokens`: the request's, `said`: those of all requests.
    """
    num_levels = min(limits.branch, num_guesses)
    own = own_matches(tokens, limits, num_levels)
    matches = own + shared_matches(said, tokens, limits, num_levels)
    matches.sort(key=lambda match: -match.length)  # stable: own ones stay before others'
    nodes = _by_frequency(matches, limits) if limits.by_frequency else _by_recency(matches, limits)
    columns = {id(node): column for column, node in enumerate(nodes[:num_guesses], 1)}
    best = nodes[:num_guesses]
    parents = [0 if node.parent is None else columns[id(node.parent)] for node in best]
    return [node.token for node in best], parents, matches[0].length if best else 0


def _by_recency(matches: list[Match], limits: Limits) -> list[Node]:
    """Nodes of longer matches first, then level by level. The longer the context, the fewer children a node has."""
    root: dict[int, Node] = {}
    nodes = []
    longest = max(1, limits.branch - 1)
    for rank, match in enumerate(matches):
        children, parent = root, None
        for depth, token in enumerate(match.following):
            if token not in children:
                spare = max(0, longest - match.length - depth) * (limits.max_breadth - limits.min_breadth) // longest
                kept = len(children) < limits.min_breadth + spare
                children[token] = Node(token, depth, rank, match.length, kept=kept, parent=parent)
                nodes.append(children[token])
            parent = children[token]
            if not parent.kept:
                break
            children = parent.children
    return sorted((node for node in nodes if node.kept), key=lambda node: (-node.length, node.depth, node.rank))


def _by_frequency(matches: list[Match], limits: Limits) -> list[Node]:
    """The most probable first; a match has as many votes as tokens."""
    nodes: list[Node] = []
    level: list[tuple[Node | None, list[tuple[int, Match]]]] = [(None, list(enumerate(matches)))]
    for depth in range(max((len(match.following) for match in matches), default=0)):
        below = []
        for parent, through in level:
            votes: dict[int, list[tuple[int, Match]]] = {}
            for rank, match in through:
                if depth < len(match.following):
                    votes.setdefault(match.following[depth], []).append((rank, match))
            ordered = sorted(votes.items(), key=lambda item: (-sum(m.length for _, m in item[1]), item[1][0][0]))
            kept = ordered[: limits.max_breadth]
            total = sum(match.length for _, voters in kept for _, match in voters)
            above = 1 << 20 if parent is None else parent.probability
            for token, voters in kept:
                weight = sum(match.length for _, match in voters)
                node = Node(token, depth, voters[0][0], voters[0][1].length, weight, parent=parent)
                node.probability = above * ((weight << 20) // total) >> 20
                nodes.append(node)
                below.append((node, voters))
        level = below
    return sorted(nodes, key=lambda node: (-node.probability, node.depth, node.rank))


def accepted(guesses: list[int], parents: list[int], truth: list[int]) -> int:
    """How many of the tokens that come are found by walking down from the root."""
    column, length = 0, 0
    for token in truth:
        below = [
            child
            for child, (guessed, parent) in enumerate(zip(guesses, parents, strict=True), 1)
            if parent == column and guessed == token
        ]
        if not below:
            break
        column, length = below[0], length + 1
    return length


def runs(prompt: list[int], answer: list[int], limits: Limits, width: int) -> list[list[int]]:
    """What each step commits where decoding gives `answer`, whose first token the prefill draws, in an engine alone."""
    done, steps = 1, []
    while done < len(answer):
        known = prompt + answer[:done]
        guesses, parents, _ = guess(known, [known], limits, width - 1)
        count = accepted(guesses, parents, answer[done:]) + 1
        steps.append(answer[done : done + count])
        done += count
    return steps
