"""The drafting methods as flags and checkpoints know them, a record each. How they run: `speculative/methods.py`."""

from msgspec import Struct

from overlap_spec.config.draft_kind import DraftKind

PLAIN = "NONE"
NGRAM = "NGRAM"  # has flags of its own
MTP = "NEXTN"  # the method that drafts with a layer of the target's own checkpoint
OWN_METHOD = "MODULE:METHOD"  # the form of a name of a method outside this package
SMOLLM2_SPEC = ("EAGLE3", 3, 1, 4)  # the alias's method, steps, topk, draft tokens


class MethodFacts(Struct, frozen=True, kw_only=True):
    """A method's requirements on flags and draft."""

    draft_kinds: tuple[DraftKind, ...] = ()  # kinds of draft that it accepts, the usual one first; empty: no draft
    takes_token_map: bool = False  # its head has the whole vocabulary, so a token map can select rows of it
    uses_own_layer: bool = False  # without a draft, it drafts with an MTP layer of the target's checkpoint
    compares_tokenizers: bool = False  # its draft is a language model, whose token ids must be the target's
    numbers: tuple[int, int, int] | None = None  # default steps, topk, draft tokens; None: they follow the target


METHOD_FACTS = {
    PLAIN: MethodFacts(),
    "EAGLE": MethodFacts(draft_kinds=(DraftKind.EAGLE_2, DraftKind.MTP), takes_token_map=True, uses_own_layer=True),
    "EAGLE3": MethodFacts(draft_kinds=(DraftKind.EAGLE_3,)),
    MTP: MethodFacts(draft_kinds=(DraftKind.MTP,), takes_token_map=True, uses_own_layer=True),
    "STANDALONE": MethodFacts(
        draft_kinds=(DraftKind.LANGUAGE_MODEL,),
        takes_token_map=True,
        compares_tokenizers=True,
        numbers=(3, 1, 4),  # SGLang's
    ),
    NGRAM: MethodFacts(),
}
OF_OWN_METHODS = MethodFacts()


def facts_of(method: str) -> MethodFacts:
    """The record of that name; one without requirements for a method outside this package."""
    return METHOD_FACTS.get(method, OF_OWN_METHODS)


def methods_where(asked: str) -> list[str]:
    """The names of the methods whose field `asked` is true."""
    return [name for name, facts in METHOD_FACTS.items() if getattr(facts, asked)]


def is_own_method(method: str) -> bool:
    """Whether the name is `MODULE:METHOD`: a `Method` of a module outside this package."""
    return ":" in method
