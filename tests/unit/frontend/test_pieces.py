"""A text that is cut has the token ids of the whole one; and which tokenizers leave which texts whole."""

import random
from array import array

import pytest
from support.small_tokenizers import byte_fallback_tokenizer, smollm2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from overlap_spec.frontend import codec as codec_module
from overlap_spec.frontend.chat_template import NoChatTemplate
from overlap_spec.frontend.codec import CUT, PATTERNS, PIECE, KnownPieces, Pieces, TextCodec, keeps_all_text

PARTS = [
    *("a", "word", "I'll", "don't", "s", "x1", "12345", "é", "e\u0301", "字", "مرحبا", "\U0001f600", "\u00a0", "\x85"),
    *(" ", " ", " ", "  ", "\n", "\n", "\n\n", "\r\n", "\t", " \n ", "'", "...", "!\n", "。\n", "<|im_end|>"),
]
WORDS = ["the word is a word", "a\nb c", "x = 12 if y else 5", "I'll don't", "字 字\n字", "  \n\n  !!\n"] * 20


def trained(pattern: str | None, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A byte-level BPE that splits by a pattern, or by ByteLevel's own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<s>", special=True)])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return tokenizer


def codec_of(tokenizer: Tokenizer) -> TextCodec:
    return TextCodec(tokenizer, NoChatTemplate({}), ())


CODECS = {
    "smollm2": smollm2,
    **{f"pattern {at}": lambda each=each: codec_of(trained(each)) for at, each in enumerate(sorted(PATTERNS))},
    "byte level's own": lambda: codec_of(trained(None)),
    "composed": lambda: codec_of(trained(None, normalizers.NFC())),
}


@pytest.mark.parametrize("name", CODECS)
def test_pieces_have_the_ids_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "PIECE", 7)
    monkeypatch.setattr(codec_module, "WINDOW", 4)
    codec, draw, num_cuts = CODECS[name](), random.Random(3), 0
    for _ in range(150):
        text = "".join(draw.choices(PARTS, k=draw.randrange(80)))
        cut = [piece for piece in codec.pieces(text) if piece] or [""]
        assert "".join(cut) == text
        monkeypatch.setattr(codec_module, "WINDOW", 1000)
        assert list(codec.pieces(text)) == cut, "cuts do not depend on where the search pauses"
        monkeypatch.setattr(codec_module, "WINDOW", 4)
        ids = [token for piece in cut for token in codec.encode(piece, False)]
        assert ids == codec.encode(text, False)
        assert codec.with_special_tokens(array("i", ids)).tolist() == codec.encode(text, True)
        num_cuts += len(cut) - 1
    assert num_cuts > 200


def test_what_was_used_last_is_known() -> None:
    known, ids = KnownPieces(most=10), array("i", [1])
    for piece in ("aaaa", "bbbb", "aaaa"):
        known.put(piece, ids)
    assert known.get("aaaa") is ids
    known.put("cccc", array("i"))
    assert known.get("bbbb") is None, "the one that was not used for longest has made room"
    assert known.get("aaaa") is ids and known.get("cccc") == array("i")
    known.put("d" * 11, ids)
    assert known.get("d" * 11) is None and known.get("aaaa") is ids, "what cannot fit drives nothing out"
    known.put("e" * 10, ids)
    assert [known.get(piece) for piece in ("aaaa", "cccc", "e" * 10)] == [None, None, ids]


def test_most_texts_are_cut_soon() -> None:
    for text in ("many words " * 10_000, "字字字。\n" * 20_000):
        assert max(map(len, smollm2().pieces(text))) < PIECE + 20
    assert list(smollm2().pieces("字" * 50_000)) == ["字" * 50_000]  # no place is known to be safe
    assert list(smollm2().pieces("")) == [""]


def with_added(token: AddedToken) -> Tokenizer:
    tokenizer = trained(None)
    tokenizer.add_tokens([token])
    return tokenizer


def split_by(splitter: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = trained(None)
    tokenizer.pre_tokenizer = splitter
    return tokenizer


def normalized_by(normalizer: normalizers.Normalizer) -> Tokenizer:
    return trained(None, normalizer)


LEVEL = pre_tokenizers.ByteLevel


@pytest.mark.parametrize(
    ("tokenizer", "keeps"),
    [
        (byte_fallback_tokenizer(), True),
        (with_added(AddedToken("x", rstrip=True)), True),
        (with_added(AddedToken("a b")), True),
        (split_by(LEVEL(add_prefix_space=True)), True),
        (split_by(LEVEL(add_prefix_space=False, use_regex=False)), True),
        (split_by(pre_tokenizers.Sequence([pre_tokenizers.Split("x", "isolated"), LEVEL(False)])), True),
        (split_by(pre_tokenizers.Whitespace()), False),
        (normalized_by(normalizers.Strip()), False),
        (normalized_by(normalizers.NFKC()), False),
        (Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), False),
    ],
)
def test_other_tokenizers_read_a_text_as_a_whole(tokenizer: Tokenizer, keeps: bool) -> None:
    assert list(Pieces(tokenizer).of("many words " * 10_000)) == ["many words " * 10_000]
    assert keeps_all_text(tokenizer) is keeps


def test_a_cut_is_where_it_is_said_to_be() -> None:
    assert [found.start() for found in CUT.finditer("ab cd\nef\n\ng  h 1 i")] == [2, 6]
