"""The end of an output, token by token: stop token, stop string, length; text, ids and counts cut at one place."""

from collections.abc import Sequence

import pytest
from support.small_tokenizers import EOS, smollm2
from support.stops import compiled

from overlap_spec.frontend.output import Detokenizer, Output, Piece
from overlap_spec.messages import Finish, FinishKind, SamplingParams

LENGTH = Finish(FinishKind.LENGTH)


class Letters:
    """Token 97 is "a"; a token 0 waits for the next one, and is "?" if none comes."""

    def __init__(self) -> None:
        self._waiting = ""

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            if token == 0:
                self._waiting += "?"
            else:
                text, self._waiting = text + self._waiting + chr(token), ""
        return text

    def flush(self) -> str:
        text, self._waiting = self._waiting, ""
        return text


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def output(most: int = 100, **sampling: object) -> Output:
    return output_of(SamplingParams(**sampling), most, Letters())


def output_of(sampling: SamplingParams, most: int, detokenizer: Detokenizer) -> Output:
    return Output(sampling, most, detokenizer, compiled(sampling.stop, sampling.stop_regex))


def stop(token: int) -> Finish:
    return Finish(FinishKind.STOP, token)


def test_runs_pass_through() -> None:
    out = output()
    assert out.push(ids("ab"), None) == Piece("ab", ids("ab"), None)
    assert out.push([], None) == Piece("", [], None)
    assert out.push(ids("c"), LENGTH) == Piece("c", ids("c"), LENGTH)
    assert out.num_tokens == 3


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_a_stop_token_is_in_the_ids_and_not_in_the_text(stops: tuple[str, ...]) -> None:
    out = output(stop=stops)
    assert out.push(ids("ab!"), stop(ord("!"))) == Piece("ab", ids("ab!"), stop(ord("!")))
    assert out.num_tokens == 3


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_no_stop_trim_shows_the_stop_token(stops: tuple[str, ...]) -> None:
    piece = output(stop=stops, no_stop_trim=True).push(ids("ab!"), stop(ord("!")))
    assert piece == Piece("ab!", ids("ab!"), stop(ord("!")))


@pytest.mark.parametrize("stops", [(), ("zz",)])
@pytest.mark.parametrize("finish", [LENGTH, stop(98), Finish(FinishKind.ABORT)])
def test_what_was_waiting_is_flushed_at_the_end(stops: tuple[str, ...], finish: Finish) -> None:
    piece = output(stop=stops).push([97, 0, 98] if finish == stop(98) else [97, 0], finish)
    assert piece.text == "a?"


def test_a_stop_string_cuts_text_and_ids_at_the_token_that_completed_it() -> None:
    out = output(stop=("bc",))
    assert out.push(ids("ab"), None) == Piece("a", ids("ab"), None)
    assert out.push(ids("cde"), None) == Piece("", ids("c"), Finish(FinishKind.STOP, "bc"))
    assert out.num_tokens == 3


def test_no_stop_trim_shows_the_stop_string() -> None:
    out = output(stop=("bc",), no_stop_trim=True)
    assert out.push(ids("abcde"), None) == Piece("abc", ids("abc"), Finish(FinishKind.STOP, "bc"))


def test_a_stop_string_before_the_stop_token_or_the_limit_comes_first() -> None:
    for finish in (stop(ord("!")), LENGTH):
        piece = output(stop=("bc",)).push(ids("abcd!"), finish)
        assert piece == Piece("a", ids("abc"), Finish(FinishKind.STOP, "bc"))


def test_a_stop_string_on_the_very_last_token_comes_before_length() -> None:
    assert output(most=3, stop=("c",)).push(ids("abc"), LENGTH).finish == Finish(FinishKind.STOP, "c")


def test_a_stop_token_comes_before_the_stop_string_it_would_complete() -> None:
    piece = output(stop=("b!",)).push(ids("ab!"), stop(ord("!")))
    assert piece == Piece("ab", ids("ab!"), stop(ord("!")))


def test_held_text_is_given_out_when_the_request_ends_otherwise() -> None:
    out = output(stop=("bcd",))
    assert out.push(ids("abc"), None).text == "a"
    assert out.push(ids("x"), None).text == "bcx"
    assert out.push(ids("bc"), LENGTH).text == "bc"


def test_held_text_is_given_out_when_the_request_is_ended_from_outside() -> None:
    out = output(stop=("bcd",))
    out.push([*ids("abc"), 0], None)
    assert out.end() == "bc?"


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_more_tokens_than_asked_are_cut_whatever_the_scheduler_says(stops: tuple[str, ...]) -> None:
    out = output(most=2, stop=stops)
    assert out.push(ids("abc!"), stop(ord("!"))) == Piece("ab", ids("ab"), LENGTH)
    assert out.num_tokens == 2


def test_the_last_token_that_fits_ends_the_request_although_the_scheduler_says_nothing() -> None:
    assert output(most=2).push(ids("ab"), None).finish == LENGTH


def test_a_stop_string_is_not_looked_for_before_the_least_number_of_tokens() -> None:
    out = output(stop=("b",), min_new_tokens=3)
    assert out.push(ids("bb"), None) == Piece("bb", ids("bb"), None)
    assert out.push(ids("ab"), None) == Piece("a", ids("ab"), Finish(FinishKind.STOP, "b"))


def test_the_first_token_that_may_be_the_last_may_complete_a_stop_string() -> None:
    out = output(stop=("b",), min_new_tokens=2)
    assert out.push(ids("ab"), None) == Piece("a", ids("ab"), Finish(FinishKind.STOP, "b"))
    assert out.num_tokens == 2


def test_a_pattern_that_the_end_of_the_answer_decides_ends_it() -> None:
    ended = Finish(FinishKind.STOP, r"b\b")
    assert output(stop_regex=(r"b\b",)).push(ids("ab"), LENGTH) == Piece("a", ids("ab"), ended)
    assert output(stop_regex=(r"b\b",)).push(ids("ab!"), stop(ord("!"))) == Piece("a", ids("ab!"), ended)
    assert output(stop_regex=(r"b\b",)).push(ids("ab."), None) == Piece("a", ids("ab."), ended)
    assert output(stop_regex=(r"b\b",)).push(ids("abc"), LENGTH) == Piece("abc", ids("abc"), LENGTH)


def test_text_before_the_least_number_of_tokens_is_what_a_pattern_looks_back_at() -> None:
    out = output(stop_regex=(r"\bb", "^c"), min_new_tokens=2)
    assert out.push(ids("abcb"), LENGTH) == Piece("abcb", ids("abcb"), LENGTH)


@pytest.mark.parametrize("run", [1, 2, 3, 7, 100])
def test_the_result_does_not_depend_on_the_runs(run: int) -> None:
    """Speculation commits several tokens at a time; where the runs are cut must not show."""
    codec = smollm2()
    tokens = codec.encode("Say 漢字 and 🦙🦙, then stop here. And more.", add_special_tokens=False)
    sampling = SamplingParams(stop=("stop here",))
    out = output_of(sampling, 100, codec.detokenizer(True))
    pieces = [out.push(tokens[0:run], None)]
    while pieces[-1].finish is None:
        start = len(pieces) * run
        pieces.append(out.push(tokens[start : start + run], None))
    assert "".join(piece.text for piece in pieces) == "Say 漢字 and 🦙🦙, then "
    cut = [token for piece in pieces for token in piece.token_ids]
    assert codec.decode(cut, True) == "Say 漢字 and 🦙🦙, then stop here"
    assert out.num_tokens == len(cut)
    assert pieces[-1].finish == Finish(FinishKind.STOP, "stop here")


def test_eos_of_a_real_tokenizer_is_not_shown() -> None:
    codec = smollm2()
    tokens = [*codec.encode("Done.", add_special_tokens=False), EOS]
    shown = output_of(SamplingParams(no_stop_trim=True, skip_special_tokens=False), 100, codec.detokenizer(False))
    assert output_of(SamplingParams(), 100, codec.detokenizer(True)).push(tokens, stop(EOS)).text == "Done."
    assert shown.push(tokens, stop(EOS)).text == "Done.<|im_end|>"
