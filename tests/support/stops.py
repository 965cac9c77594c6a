"""Stops as the service compiles them, searched in a text that is cut somewhere."""

import asyncio
from collections.abc import Iterable

from overlap_spec.frontend.stop_strings import StopCompiler, Stops, StopStrings


def compiled(strings: Iterable[str] = (), patterns: Iterable[str] = ()) -> Stops:
    return asyncio.run(StopCompiler().compiled(tuple(strings), tuple(patterns), "owner"))


def search_of(*patterns: str, stops: tuple[str, ...] = (), keep_match: bool = False) -> StopStrings:
    return StopStrings(compiled(stops, patterns), keep_match)


def feed_all(search: StopStrings, pieces: Iterable[str]) -> tuple[list[str], str | None]:
    """What came out after each piece, and at the end; and the match."""
    out = []
    for piece in pieces:
        text, found = search.feed(piece)
        out.append(text)
        if found is not None:
            return out, found
    text, found = search.flush()
    return [*out, text], found
