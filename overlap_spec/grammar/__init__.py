"""Grammars of structured output: from a request's text to an automaton over the model's tokens (llguidance).

The tokenizer process has a grammar compiled in a process of its own, to refuse a bad one, or one that takes too much
time or memory; the worker compiles it again and follows it.
"""

from overlap_spec.grammar.compiler import GrammarCompiler
from overlap_spec.grammar.vocabulary import GrammarVocabulary

__all__ = ["GrammarCompiler", "GrammarVocabulary"]
