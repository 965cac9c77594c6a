"""Logit processors of one's own, by name, each with the same rule in plain Python: no tensors, one row, one history."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from overlap_spec.sampling.stages import LogitProcessor

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_no_repeated_trigram.py"

Rule = Callable[[Sequence[int], int], set[int]]  # prompt and output so far, length of the prompt -> forbidden tokens


@dataclass(frozen=True)
class OwnProcessor:
    """What an engine is given, and what it must forbid."""

    in_tensors: LogitProcessor
    forbidden: Rule


def example(whole: bool) -> LogitProcessor:
    """The one that the docs show."""
    found = importlib.util.spec_from_file_location("no_repeated_trigram", EXAMPLE)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    processor: LogitProcessor = module.NoRepeatedTrigram(whole)
    return processor


def third_tokens(tokens: Sequence[int], prompt_len: int, whole: bool) -> set[int]:
    """Tokens that would end a trigram that has been."""
    said = list(tokens if whole else tokens[prompt_len:])
    if len(said) < 2:
        return set()
    return {said[i + 2] for i in range(len(said) - 2) if said[i : i + 2] == said[-2:]}


OWN_PROCESSORS = {
    "no repeated trigram": OwnProcessor(example(whole=True), partial(third_tokens, whole=True)),
    "no repeated trigram in the output": OwnProcessor(example(whole=False), partial(third_tokens, whole=False)),
}
