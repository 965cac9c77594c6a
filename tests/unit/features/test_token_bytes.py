"""The bytes of tokens: of a byte-level tokenizer, and of one with byte fallback."""

from support.small_tokenizers import SMOLLM2, byte_fallback_tokenizer
from tokenizers import Tokenizer

from overlap_spec.client.log_probs import read_log_probs
from overlap_spec.features.log_probs.frontend import NO_PAIR, PAIR, RequestLogProbs, TokenBytes
from overlap_spec.messages import LogProbParams

TEXT = "The price: 12 € — naïve 🙂 ꙮ café\n\n  tabs\tand <|im_end|>"


def test_the_bytes_of_byte_level_tokens_add_up_to_the_text() -> None:
    tokenizer = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    tokens = TokenBytes(tokenizer)
    parts = [tokens.of(token) for token in ids]
    assert b"".join(parts).decode() == TEXT
    assert any(not _is_text(part) for part in parts), "a character takes several tokens"
    assert tokens.of(10**6) == b"", "a padded vocabulary"


def test_byte_fallback() -> None:
    tokens = TokenBytes(byte_fallback_tokenizer())
    assert [tokens.of(token) for token in (1, 3, 3 + 0xE2, 259, 260, 262)] == [
        b"<s>", b"\0", b"\xe2", b" ", b" Hello", b"Hello",
    ]  # fmt: skip


def test_records_are_cut_and_named() -> None:
    asked = LogProbParams(top=1, token_ids=(7,), prompt_from=1)
    log_probs = RequestLogProbs(asked, 6, lambda token: b"t%d" % token)
    record = PAIR.pack(-0.5, 8) + PAIR.pack(-0.25, 9) + PAIR.pack(-1.5, 7)
    part = log_probs.part_of_prompt(record)
    first, second = read_log_probs(part)
    assert (first.token_id, first.log_prob, first.top, first.listed) == (6, None, [], [])
    assert (second.token_id, second.text, second.log_prob) == (8, "t8", -0.5)
    assert [(each.token_id, each.log_prob, each.token) for each in second.top + second.listed] == [
        (9, -0.25, b"t9"), (7, -1.5, b"t7"),
    ]  # fmt: skip
    assert log_probs.first_of_prompt() is None, "once"
    assert len(read_log_probs(log_probs.of_output(record * 3, 2))) == 2
    missing = PAIR.pack(-0.5, 8) + NO_PAIR + PAIR.pack(-1.5, 7)  # a vocabulary of fewer tokens than were asked for
    assert read_log_probs(log_probs.of_output(missing, 1))[0].top == []


def _is_text(part: bytes) -> bool:
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True
