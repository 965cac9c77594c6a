"""Structured output: what requests with a grammar may say.

The scheduler asks the worker for a grammar, which is ready or failed then, and tells it when it is no longer needed.
"""

from overlap_spec.messages import Extension, Grammar

# --- scheduler -> worker ----------------------------------------------------------------------------------


class PrepareGrammar(Extension, frozen=True):
    """Compile the grammar of a request. The worker answers GrammarReady, or GrammarFailed.

    `uid`: of an audit, its request's negated: the two may overlap. `output`: tokens that it has consumed
    already, int32, little-endian.
    """

    uid: int
    grammar: Grammar
    output: bytes = b""


class DropGrammar(Extension, frozen=True):
    """The request is gone, and no step in flight has it."""

    uid: int


# --- worker -> scheduler ----------------------------------------------------------------------------------


class GrammarReady(Extension, frozen=True):
    """A prepared grammar can be followed from now on."""

    uid: int


class GrammarFailed(Extension, frozen=True):
    """A grammar cannot be followed, or no further: its request ends with this error. No result with it comes first."""

    uid: int
    error: str


EXTENSIONS = (PrepareGrammar, DropGrammar, GrammarReady, GrammarFailed)
