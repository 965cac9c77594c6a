"""Where the answer begins after reasoning that has a budget, by the definition, from the output's tokens alone."""

from collections.abc import Sequence

from overlap_spec.messages import Thinking


def answer_begins(tokens: Sequence[int], thinking: Thinking) -> int | None:
    """The index of the answer's first token; None while the output reasons, or may begin to."""
    output, opening, closing = list(tokens), list(thinking.opening), list(thinking.closing)
    opens = bool(opening) and output[: len(opening)] == opening
    if not opens and not thinking.is_open:
        return None if output == opening[: len(output)] and len(output) < len(opening) else 0
    begin = len(opening) if opens else 0
    thought = output[begin : begin + thinking.budget]
    ends = [at + len(closing) for at in range(len(thought)) if thought[at : at + len(closing)] == closing]
    last = thinking.budget + len(closing)
    found = ends[0] if ends else last
    return begin + found if len(output) >= begin + found else None
