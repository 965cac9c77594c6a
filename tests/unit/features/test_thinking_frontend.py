"""What a prompt leaves open, and which special tokens stay in the text."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from support.frontend_harness import LIMITS, serving
from support.small_tokenizers import EOS, smollm2
from tokenizers import AddedToken, Tokenizer

from overlap_spec.errors import RequestError
from overlap_spec.features.grammar.frontend import GrammarChecks, GrammarHook
from overlap_spec.features.thinking.frontend import ThinkingHook, after_reasoning, opening_of, with_budget
from overlap_spec.frontend.chat_template import NoChatTemplate
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.frontend.hooks import Preparing, RequestHook
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.messages import (
    ChatPrompt,
    Finish,
    FinishKind,
    Grammar,
    GrammarKind,
    Prompt,
    Reasoning,
    SamplingParams,
    TextDeltas,
    TextPrompt,
    Thinking,
)

THINK = Reasoning("<think>", "</think>")
NO_TOKEN_OF_IT = Thinking(3, False, (), (50,))


def chat(content: str, generates: bool = True) -> ChatPrompt:
    return ChatPrompt([{"role": "user" if generates else "assistant", "content": content}], None, {}, generates)


class AnyGrammar(GrammarChecks):
    """Finds nothing wrong."""

    def __init__(self) -> None:
        """Starts no process."""

    async def checked(self, grammar: Grammar, owner: str) -> Grammar:
        return grammar


@pytest.mark.parametrize(
    ("hook", "asked"),
    [
        (ThinkingHook(smollm2()), {"thinking": NO_TOKEN_OF_IT}),
        (GrammarHook(AnyGrammar()), {"grammar": Grammar(GrammarKind.REGEX, "a", thinking=NO_TOKEN_OF_IT)}),
    ],
    ids=["budget", "grammar"],
)
def test_markers_are_the_models_tokens(hook: RequestHook, asked: dict[str, Any]) -> None:
    def prepare(vocab_size: int) -> None:
        limits = replace(LIMITS, vocab_size=vocab_size)
        request = OpenRequest(1, 1, "r", "key:a")
        asyncio.run(hook.prepare(SamplingParams(**asked), Preparing(request, TextPrompt("x"), [1], limits)))

    prepare(51)
    with pytest.raises(RequestError, match="token id 50 is outside the vocabulary") as refused:
        prepare(50)
    assert refused.value.field == "thinking"


@pytest.mark.parametrize(
    ("prompt", "text", "opening"),
    [
        (chat("hi"), "<|assistant|>", ""),
        (chat("<think>"), "<think><|end|><|assistant|>", ""),
        (chat("hi"), "<|assistant|><think>\n", "<think>"),
        (chat("hi"), "<|assistant|><think>\n\n</think>\n\n", "<think></think>"),
        (chat("hi"), "<|assistant|></think>", "<think></think>"),
        (chat("<think>I was about to say that", False), "I was about to say that", "<think>"),
        (chat("<think>a</think> The answer", False), "The answer", ""),
        (TextPrompt("x <think>\n"), "x <think>\n", "<think>"),
    ],
)
def test_what_a_prompt_leaves_open(prompt: Prompt, text: str, opening: str) -> None:
    codec = smollm2()
    assert opening_of(prompt, codec.encode(text, False), THINK, codec) == opening


def test_the_marker_comes_before_the_first_text_once() -> None:
    async def run() -> list[str]:
        async with serving() as harness:
            harness.generate("Why? <think>", max_new_tokens=9, reasoning=THINK)
            uid = (await harness.admitted()).uid
            texts = []
            for text in (" So", " be it"):
                harness.commit((uid, smollm2().encode(text, False), None))
                texts += (await harness.heard(TextDeltas)).texts
            harness.commit((uid, [EOS], Finish(FinishKind.STOP, EOS)))
            return texts + (await harness.heard(TextDeltas)).texts

    assert asyncio.run(run()) == ["<think> So", " be it", ""]


def test_markers_stay_out_of_a_text_that_is_not_told_apart() -> None:
    async def run() -> list[str]:
        async with serving() as harness:
            harness.generate("Why? <think>", reasoning=Reasoning("<think>", "</think>", is_separate=False))
            admit = await harness.admitted()
            assert admit.sampling.reasoning is None
            harness.commit((admit.uid, smollm2().encode(" So", False), None))
            return (await harness.heard(TextDeltas)).texts

    assert asyncio.run(run()) == [" So"]


@pytest.mark.parametrize(
    ("opening", "implicit", "is_open"), [("", False, False), ("", True, True), ("<think>", False, True)]
)
def test_a_budget_counts_from_where_the_reasoning_begins(opening: str, implicit: bool, is_open: bool) -> None:
    codec, reasoning = smollm2(), Reasoning("<think>", "</think>", budget=7, is_implicit=implicit)
    begins, ends = (tuple(codec.encode(text, False)) for text in ("<think>", "</think>"))
    found = with_budget(SamplingParams(), reasoning, opening, codec).thinking
    assert found == Thinking(7, is_open, begins, ends)
    assert with_budget(SamplingParams(), reasoning, "<think></think>", codec).thinking is None


def test_a_grammar_is_of_what_follows_the_reasoning() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a")
    sampling = SamplingParams(grammar=grammar, reasoning=THINK)
    for opening, reasons, begins in (("", THINK, False), ("<think>", THINK, True), ("<think></think>", None, False)):
        settled = after_reasoning(sampling, THINK, opening).grammar
        assert settled == Grammar(GrammarKind.REGEX, "a", (), reasons, begins)
    assert after_reasoning(SamplingParams(), THINK, "<think>") == SamplingParams()


def marked_codec() -> TextCodec:
    """SmolLM2's with two special tokens more."""
    tokenizer = Tokenizer.from_str(smollm2().tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("[CALL]", "[OTHER]")])
    return TextCodec(tokenizer, NoChatTemplate({}), (EOS,))


def test_special_tokens_that_stay_in_the_text() -> None:
    codec = marked_codec()
    ids = codec.encode("[OTHER] a [CALL] b<|im_end|>", False)
    for shown, text in (((), " a  b"), (("[CALL]", "unknown"), " a [CALL] b"), (("a",), " a  b")):
        pieces = codec.detokenizer(True, shown_tokens=shown)
        assert "".join(pieces.push([token]) for token in ids) + pieces.flush() == text
    assert "[OTHER]" in codec.detokenizer(False, shown_tokens=("[CALL]",)).push(ids)
