"""A tokenizer for tiny models: one token per printable character, and words that only a model can emit.

    0 <unk>   1 <s>   2 </s>   3 <|user|>   4 <|assistant|>   5 newline   6.. ' ' to '~'   then w101, w102, ...

Encoding and decoding are exact inverses on printable text.
"""

import json
from collections.abc import Collection
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse, Replace, Sequence
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_vocabulary(size: int = 128) -> list[str]:
    """The token of each id."""
    characters = ["\n", *(chr(code) for code in range(ord(" "), ord("~") + 1))]
    known = [*SPECIAL, *characters]
    return [*known, *(f"w{index}" for index in range(len(known), size))][:size]


def write_tokenizer(
    directory: Path, vocab_size: int = 128, minds_special: bool = False, markers: Collection[str] = ()
) -> Path:
    """Write tokenizer.json and tokenizer_config.json (with a chat template) into a model's directory.

    `minds_special`: text begins with <s>, and </s> is decoded with a space before it.
    `markers`: further special tokens, the last of the vocabulary; those without a bracket are words that text may have.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokens = [*tiny_vocabulary(vocab_size - len(markers)), *markers]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    added = {token: "<" in token for token in (*SPECIAL, *markers)}
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in added if added[each]])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in added if not added[each]])
    if minds_special:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.decoder = Sequence([Replace("</s>", " </s>"), Fuse()])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return directory
