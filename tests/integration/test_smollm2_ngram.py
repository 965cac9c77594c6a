"""N-grams on real weights in float32: guesses are support/reference/ngram.py's, and more stand than in prompt lookup.

The prompts are those that copy (`overlap_spec/data/prompts/copy20.json`). The default run takes 2 of them x 32 tokens;
`-m full` takes all 20, and lets transformers answer them by prompt lookup.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference.ngram import Limits, guess, runs
from support.solo import Solo, SoloAnswer

from overlap_spec.config import ModelFiles
from overlap_spec.frontend.codec import load_codec
from overlap_spec.messages import ChatPrompt, SamplingParams

FEW_PROMPTS, FEW_TOKENS, ALL_TOKENS = 2, 32, 96
WIDTH, LOOKED_UP = 12, 10  # draft tokens of a window, its root included; transformers' default


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    """Token ids, in the chat template."""
    import overlap_spec

    texts = json.loads((Path(overlap_spec.__file__).parent / "data" / "prompts" / "copy20.json").read_text())
    assert files.tokenizer_dir is not None
    codec = load_codec(Path(files.tokenizer_dir))
    return [codec.encode(codec.render(ChatPrompt([{"role": "user", "content": text}])), False) for text in texts]


@pytest.fixture(scope="module")
def engine(files: ModelFiles) -> Iterator[Solo]:
    solo = Solo(files, device="cpu", speculative_algorithm="NGRAM", speculative_num_draft_tokens=WIDTH)
    yield solo
    solo.close()


def answer_alone(engine: Solo, prompt: list[int], num_tokens: int) -> SoloAnswer:
    """By an engine that has heard nothing yet."""
    engine.executor.decode_step.forget()
    return engine.answer(prompt, SamplingParams(max_new_tokens=num_tokens, temperature=0.0, seed=0))


def accept_length(all_runs: list[list[list[int]]]) -> float:
    lengths = [len(run) for answer in all_runs for run in answer]
    return sum(lengths) / len(lengths)


def tokens_per_forward(answers: list[tuple[list[int], int]]) -> float:
    """Of answers and the forwards that each took, the prefill among them: what a run cut at the end gave counts."""
    return sum(len(tokens) for tokens, _ in answers) / sum(count for _, count in answers)


@pytest.mark.full
def test_guesses_and_runs_are_the_written_out_loops(engine: Solo, prompts: list[list[int]]) -> None:
    for prompt in prompts[:FEW_PROMPTS]:
        answer = answer_alone(engine, prompt, FEW_TOKENS)
        expected = runs(prompt, answer.tokens, Limits(), WIDTH)
        assert answer.runs[: len(expected) - 1] == expected[:-1]  # the last one may go on past the end
        known = [*prompt, answer.tokens[0]]
        for run, guessed, parents in zip(answer.runs, answer.guesses, answer.parents, strict=True):
            tokens, columns, _ = guess(known, [known], Limits(), WIDTH - 1)
            count = len(tokens)
            assert guessed == tokens + [-1] * (WIDTH - 1 - count)
            assert parents[:count] == columns
            known = known + run


def looked_up(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Transformers' greedy answer by prompt lookup, and how many forwards it took: each verifies guesses."""
    forward, count = model.forward, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return forward(*arguments, **named)

    model.forward = counted
    ids = torch.tensor([prompt])
    try:
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                prompt_lookup_num_tokens=LOOKED_UP,
            )
    finally:
        model.forward = forward
    return out[0, len(prompt) :].tolist(), count


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_more_is_accepted_than_in_prompt_lookup(
    engine: Solo, files: ModelFiles, prompts: list[list[int]], record_summary
) -> None:
    import transformers

    path = Path(files.weights)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    answers = [answer_alone(engine, prompt, ALL_TOKENS) for prompt in prompts]
    theirs = [looked_up(model.eval(), prompt, ALL_TOKENS) for prompt in prompts]
    ours = accept_length([answer.runs for answer in answers])
    counted_alike = tokens_per_forward([(answer.tokens, len(answer.runs) + 1) for answer in answers])
    lookup = tokens_per_forward(theirs)
    same = sum(answer.tokens == tokens for answer, (tokens, _) in zip(answers, theirs, strict=True))
    print(
        f"tokens a forward: n-grams {counted_alike:.3f} (accept length {ours:.3f}), prompt lookup {lookup:.3f}; "
        f"{same} of {len(prompts)} answers are the same"
    )
    assert counted_alike >= lookup
    figures = {
        "prompts": len(prompts),
        "tokens": ALL_TOKENS,
        "ngram": round(ours, 3),
        "ngram_per_forward": round(counted_alike, 3),
        "prompt_lookup": round(lookup, 3),
    }
    record_summary("ngram_and_prompt_lookup", figures | {"same_answers": same})
