"""Tokenizers to test with: the model that ships, and one with byte fallback as Llama 2 has it."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

import overlap_spec
from overlap_spec.frontend.codec import TextCodec, load_codec

SMOLLM2 = Path(overlap_spec.__file__).parent / "data" / "smollm2"
EOS = 2  # <|im_end|> of SmolLM2


@cache
def smollm2() -> TextCodec:
    return load_codec(SMOLLM2)


def byte_fallback_tokenizer() -> Tokenizer:
    """Ids 0 <unk>, 1 <s>, 2 </s>, 3..258 the bytes, then a few words with the mark of a leading space."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁Hello", "▁world", "Hello", "!", "▁▁"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer
