"""Requests with a grammar draw tokens that it allows: the worker's part, which compiles and follows grammars."""

from collections.abc import Sequence

from overlap_spec.config import Settings
from overlap_spec.features.grammar import DropGrammar, GrammarFailed, PrepareGrammar
from overlap_spec.features.grammar.grammars import Grammars
from overlap_spec.features.grammar.step import GrammarSteps, PatientGrammarSteps
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.features.grammar.window_masks import WORD_BYTES, mask_words
from overlap_spec.messages import Extension
from overlap_spec.worker.build import Parts
from overlap_spec.worker.hooks import Needs, StepHook
from overlap_spec.worker.startup.geometry import LoadedModels


def attach(parts: Parts) -> StepHook:
    """Follow the grammars of requests; without a tokenizer there are none."""
    settings, files = parts.settings, parts.settings.model.files
    directory = None if settings.skip_tokenizer_init else files.tokenizer_dir
    vocabulary = GrammarVocabulary(directory, parts.target.vocab_size, files.eos_token_ids)
    if vocabulary.why_not:
        return NoGrammars()
    grammars = Grammars(vocabulary)
    if settings.model.device == "cuda":
        grammars.build_vocabulary()  # in a thread, while graphs are captured
    if settings.ranks > 1:
        return PatientGrammarSteps(grammars, parts.slots, parts.device, parts.method.tree)
    return GrammarSteps(grammars, parts.slots, parts.device, parts.method.tree, _proposes(settings))


def needs(settings: Settings, models: LoadedModels) -> Needs:
    """A mask of the vocabulary for each column."""
    return Needs(column_bytes=0 if settings.skip_tokenizer_init else WORD_BYTES * mask_words(models.target.vocab_size))


class NoGrammars(StepHook):
    """Where no grammar can be followed."""

    def __init__(self) -> None:
        self._replies: list[GrammarFailed] = []

    def message(self, message: Extension) -> bool:
        if isinstance(message, PrepareGrammar):
            self._replies.append(GrammarFailed(message.uid, "grammar: this engine follows no grammars"))
        return isinstance(message, PrepareGrammar | DropGrammar)

    def replies(self) -> Sequence[Extension]:
        refused, self._replies = self._replies, []
        return refused


def _proposes(settings: Settings) -> bool:
    """Whether tokens that a grammar requires become guesses. Some ways to judge a guess ask how it was drawn."""
    spec = settings.spec
    return settings.proposes_forced and spec.accept.asked_by is None and not spec.simulated_accept_lens
