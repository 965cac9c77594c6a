"""Grammars of structured output: from a request's text to an automaton over the model's tokens (llguidance).

The tokenizer process compiles a grammar to refuse a bad one; the worker compiles it again and follows it.
"""

from overlap_spec.grammar.compiler import MAX_COMPILE_S, GrammarCompiler
from overlap_spec.grammar.vocabulary import GrammarVocabulary

__all__ = ["MAX_COMPILE_S", "GrammarCompiler", "GrammarVocabulary"]
