"""Runs the automaton of a request's stop patterns over a text, character by character.

Every position that a match in progress may stand at keeps where the earliest such match begins. So three things are
known after each character, without reading any other one again: whether a match ends here, where the earliest of those
begins, and from where on the text may still become a match.

What is reached from one set of positions by one character is computed once and kept, for all answers that search for
the same patterns. The order of the beginnings belongs to such a set, the beginnings themselves to a search:

    a[ab]+c   after "a"         1 position,  begun at [0]
              after "ab"        1 position,  begun at [0]
              after "aba"       2 positions, begun at [0, 2]     -> "b" leads to 1 position, begun at [0]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from overlap_spec.frontend.stop_patterns import ALWAYS, EDGE, NUM_KINDS, ClassTable, Flags, PatternReader, kind_of

LOOK_BACK = 1024  # characters of a match that are held back, and cut off: a longer one is cut from there on
MOST_BYTES = 1 << 19  # of what one automaton keeps; it forgets all of it then
STATE_BYTES = 700  # of a state without positions
MOVE_BYTES = 400  # of what one character leads to
NEVER = np.int32(1 << 30)

Ints = npt.NDArray[np.int32]
Match = tuple[int, int]  # index in the beginnings, and index of the pattern


@dataclass(eq=False, slots=True)
class State:
    """Positions where matches in progress stand, with the index of their beginning, the earliest first.

    `kind`: of the character before; `moves`: what the next character leads to.
    """

    positions: Ints
    begun: Ints
    num_begun: int
    kind: int
    moves: dict[str, "Move"] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Move:
    """What a character leads to. `before` is a match that ends before it, `after` one that ends with it.

    `sources`: index of each new beginning in the old ones, where the one after the last is this character's place.
    None: nothing changes.
    """

    state: State
    sources: tuple[int, ...] | None
    before: Match | None
    after: Match | None


class Automaton:
    """Shared by all answers that search for these patterns."""

    def __init__(self, reader: PatternReader) -> None:
        self.patterns = tuple(reader.patterns)
        self._classes = ClassTable(list(reader.classes))
        self._class_of = np.array(reader.class_of, np.int32)
        pairs = np.array(sorted(reader.edges, key=lambda pair: pair[::-1]), np.int32).reshape(-1, 2)
        self._pairs = pairs
        self._contexts = np.fromiter((reader.edges[start, end] for start, end in pairs.tolist()), np.int32, len(pairs))
        self._ends = np.zeros(len(self._class_of), np.int32)  # contexts in which a match may end after a position
        self._pattern_of = np.zeros(len(self._class_of), np.int32)
        for position, (contexts, pattern) in reader.ends.items():
            self._ends[position], self._pattern_of[position] = contexts, pattern
        self._has_conditions = bool((self._contexts != ALWAYS).any()) or any(
            contexts != ALWAYS for contexts, _ in reader.ends.values()
        )
        self._edges: dict[int, tuple[Ints, Ints, npt.NDArray[np.intp]]] = {}  # by context: from, to, where each begins
        self._members: dict[str, Flags] = {}  # positions whose class a character is of
        self._states: dict[tuple[bytes, bytes, int], State] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """At most, with what is kept."""
        return MOST_BYTES + 60 * len(self._contexts) + 200 * len(self._class_of)

    def start(self, last: str = "") -> State:
        """No match is in progress, after this character, or at the beginning."""
        kind = kind_of(last) if last and self._has_conditions else EDGE
        nothing = np.zeros(0, np.int32)
        return self._state(nothing, nothing, 0, kind)

    def move(self, state: State, char: str) -> Move:
        """Compute what a character leads to."""
        kind = kind_of(char) if self._has_conditions else EDGE
        context = state.kind * NUM_KINDS + kind
        starts, ends, begins = self._edges_in(context)
        begun = np.full(len(self._class_of), NEVER, np.int32)
        begun[state.positions] = state.begun
        begun[0] = state.num_begun
        reached = np.minimum.reduceat(begun[starts], begins) if len(begins) else begun[:0]
        alive = (reached != NEVER) & self._of_char(char)[ends]
        old = reached[alive]
        is_left = np.zeros(state.num_begun + 1, np.int32)  # beginnings of which some match is still in progress
        is_left[old] = 1
        sources = np.flatnonzero(is_left)
        after = self._state(ends[alive], (np.cumsum(is_left, dtype=np.int32) - 1)[old], len(sources), kind)
        return self._kept(state, char, after, tuple(sources.tolist()))

    def at_end(self, state: State) -> Match | None:
        """The match that ends with the answer, and could not be known before."""
        return self._first_end(state, 1 << state.kind * NUM_KINDS + EDGE)

    def _kept(self, state: State, char: str, after: State, sources: tuple[int, ...]) -> Move:
        any_next = (1 << NUM_KINDS) - 1 << after.kind * NUM_KINDS
        found = self._first_end(after, any_next)
        if found is not None:
            found = sources[found[0]], found[1]
        before = self._first_end(state, 1 << state.kind * NUM_KINDS + after.kind) if self._has_conditions else None
        same = sources == tuple(range(state.num_begun))
        move = Move(after, None if same else sources, before, found)
        self._take(MOVE_BYTES + 8 * len(sources))
        state.moves[char] = move
        return move

    def _first_end(self, state: State, contexts: int) -> Match | None:
        """Of the matches that end after `state` in all these contexts, the one that begins first."""
        ending = np.flatnonzero(self._ends[state.positions] & contexts == contexts)
        if not len(ending):
            return None
        return min(zip(state.begun[ending].tolist(), self._pattern_of[state.positions[ending]].tolist(), strict=True))

    def _edges_in(self, context: int) -> tuple[Ints, Ints, npt.NDArray[np.intp]]:
        """Edges that may be taken there, by where they lead to."""
        if context not in self._edges:
            starts, ends = self._pairs[(self._contexts >> context & 1).astype(bool)].T
            distinct, begins = np.unique(ends, return_index=True)
            self._edges[context] = np.ascontiguousarray(starts), distinct, begins
        return self._edges[context]

    def _of_char(self, char: str) -> Flags:
        members = self._members.get(char)
        if members is None:
            self._take(len(self._class_of) + MOVE_BYTES)
            members = self._classes.of(char)[self._class_of]
            self._members[char] = members
        return members

    def _state(self, positions: Ints, begun: Ints, num_begun: int, kind: int) -> State:
        key = positions.tobytes(), begun.tobytes(), kind
        state = self._states.get(key)
        if state is None:
            self._take(STATE_BYTES + 16 * len(positions))
            state = self._states[key] = State(positions, begun, num_begun, kind)
        return state

    def _take(self, num_bytes: int) -> None:
        """Make room. A search goes on from a state that has been forgotten here, and finds the others anew."""
        self._num_bytes += num_bytes
        if self._num_bytes > MOST_BYTES:
            for state in self._states.values():
                state.moves.clear()
            self._states.clear()
            self._members.clear()
            self._num_bytes = num_bytes


class PatternSearch:
    """One answer's search. Places count the characters of the answer."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._state = automaton.start()
        self._begun: Sequence[int] = ()
        self._place = 0

    @property
    def open_from(self) -> int:
        """The text from this place on may become a match."""
        return max(self._begun[0], self._place - LOOK_BACK) if self._begun else self._place

    def feed(self, text: str) -> tuple[int, int, str] | None:
        """Where the first match ends and begins, and its pattern."""
        state, begun, place = self._state, self._begun, self._place
        for char in text:
            move = state.moves.get(char)
            if move is None:
                move = self._automaton.move(state, char)
            if move.before is not None:
                return self._match(place, move.before, begun)
            if move.sources is not None or move.after is not None:
                all_begun = (*begun, place)
                if move.after is not None:
                    return self._match(place + 1, move.after, all_begun)
                assert move.sources is not None
                begun = [all_begun[source] for source in move.sources]
            state = move.state
            place += 1
        self._state, self._begun, self._place = state, begun, place
        return None

    def skip(self, text: str) -> None:
        """Text in which no match may be, nor begin."""
        if text:
            self._state, self._begun = self._automaton.start(text[-1]), ()
            self._place += len(text)

    def end(self) -> tuple[int, int, str] | None:
        """The match that ends with the answer."""
        found = self._automaton.at_end(self._state)
        return None if found is None else self._match(self._place, found, self._begun)

    def _match(self, end: int, found: Match, begun: Sequence[int]) -> tuple[int, int, str]:
        return end, max(begun[found[0]], end - LOOK_BACK), self._automaton.patterns[found[1]]
