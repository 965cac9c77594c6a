"""The check of a grammar in a process of its own, which the tokenizer process has it done in."""

import json
from collections.abc import Callable

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.features.grammar.compiler import GrammarCompiler
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.messages import Grammar, GrammarKind

CHECKER = f"{__name__}:checker"
WARM_UP = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


class Checked(msgspec.Struct, frozen=True, array_like=True):
    """`error`: why a grammar is refused. `rules`: the same in Lark, where it takes Python long to make them."""

    error: str = ""
    rules: str = ""


def vocabulary_text(vocabulary: GrammarVocabulary) -> str:
    """What `checker` builds the same vocabulary from."""
    return json.dumps([vocabulary.directory, vocabulary.vocab_size, list(vocabulary.eos_token_ids)])


def checker(text: str) -> Callable[[bytes], bytes]:
    """Load a vocabulary. The function takes an encoded grammar, and returns what is `Checked`, encoded."""
    directory, vocab_size, eos_token_ids = json.loads(text)
    vocabulary = GrammarVocabulary(directory, vocab_size, tuple(eos_token_ids))
    compiler = GrammarCompiler(vocabulary)

    def check(payload: bytes) -> bytes:
        try:
            checked = Checked(rules=compiler.check(msgspec.msgpack.decode(payload, type=Grammar)))
        except RequestError as error:
            checked = Checked(error=str(error).encode(errors="replace").decode())
        return msgspec.msgpack.encode(checked)

    if not msgspec.msgpack.decode(check(msgspec.msgpack.encode(WARM_UP)), type=Checked).error:
        len(vocabulary.special_tokens)  # read once, for all checks
    return check
