"""The tokenizer inside a .gguf file: written as those files that others have beside their weights."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from overlap_spec.config import EngineConfig, cache_directory
from overlap_spec.errors import CheckpointError
from overlap_spec.frontend.codec import load_codec
from overlap_spec.hub import resolve_model
from overlap_spec.hub.gguf import write_gguf_tokenizer
from overlap_spec.hub.smollm2 import DATA, weights_file

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
TEXTS = ("It's 12345 or 2026,\r\n  not  3!\t", "e\u0301t\u00e9 日本語 🤗", "<s>a</s> <tool> <pad>", "  a\n\n\n b", "")
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Tokens and merges of a byte-level BPE, with special tokens at its end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(["it's 123 12345 not the a other the the é été 日本 日本語"] * 9, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    ends = {"<s>": CONTROL, "</s>": CONTROL, "<tool>": USER_DEFINED, "<pad>": UNUSED}
    return {
        "tokens": [*tokens, *ends],
        "types": [NORMAL] * len(tokens) + list(ends.values()),
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos": len(tokens),
        "eos": len(tokens) + 1,
    }


def write(path: Path, trained: dict[str, Any], pre: str, **changes: Any) -> Path:
    values = trained | {"model": "gpt2", "pre": pre, "add_bos": None} | changes
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(values["model"])
    if values["pre"] is not None:
        writer.add_tokenizer_pre(values["pre"])
    for key in ("tokens", "merges"):
        writer.add_array(f"tokenizer.ggml.{key}", values[key])
    writer.add_array("tokenizer.ggml.token_type", values["types"])
    writer.add_bos_token_id(values["bos"])
    writer.add_eos_token_id(values["eos"])
    writer.add_chat_template(TEMPLATE)
    if values["add_bos"] is not None:
        writer.add_add_bos_token(values["add_bos"])
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    assert tokenizer.pre_tokenizer is not None
    alone = pre_tokenizers.Sequence([tokenizer.pre_tokenizer])
    return [word for word, _ in alone.pre_tokenize_str(text)]


@pytest.mark.slow
@pytest.mark.skipif(not weights_file(Path(cache_directory())).is_file(), reason="the default model is not there yet")
def test_the_default_models_file_has_the_tokenizer_that_is_shipped(tmp_path: Path) -> None:
    directory = write_gguf_tokenizer(weights_file(Path(cache_directory())), tmp_path)
    shipped, written = (json.loads(read(each).to_str()) for each in (DATA, directory))
    assert written == shipped
    config = json.loads((directory / "tokenizer_config.json").read_text())
    expected = json.loads((DATA / "tokenizer_config.json").read_text())
    assert all(config[name] == expected[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token"))
    assert "<|im_start|>" in config["chat_template"]


@pytest.mark.parametrize(
    ("pre", "digits", "begins", "composes"),
    [
        ("llama-bpe", ["123", "45"], True, False),
        ("qwen2", ["1", "2", "3", "4", "5"], False, True),
        ("smollm", ["1", "2", "3", "4", "5"], False, False),
        ("gpt-2", ["12345"], False, False),
    ],
)
def test_text_is_split_as_the_family_splits_it(
    pre: str, digits: list[str], begins: bool, composes: bool, trained: dict[str, Any], tmp_path: Path
) -> None:
    directory = write_gguf_tokenizer(write(tmp_path / "tiny.gguf", trained, pre), tmp_path / "cache")
    tokenizer = read(directory)
    assert words(tokenizer, "12345") == digits
    assert words(tokenizer, "it's a") == ["it", "'s", "Ġa"]
    assert (words(tokenizer, "a\n\nb") == ["a", "ĊĊ", "b"]) == (pre in ("llama-bpe", "qwen2"))
    ids = tokenizer.encode("the </s>").ids
    assert (ids[0] == trained["bos"]) == begins and ids[-1] == trained["eos"]
    assert (tokenizer.normalizer is not None) == composes
    for text in TEXTS:
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        expected = "été".join(text.split("e\u0301t\u00e9")) if composes else text
        assert tokenizer.decode(plain, skip_special_tokens=False) == expected
        assert trained["tokens"].index("<pad>") not in plain, "an unused token is no text"
        assert (trained["tokens"].index("<tool>") in plain) == ("<tool>" in text)


def test_the_files_are_those_that_the_engine_reads(trained: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", trained, "llama-bpe", add_bos=False)
    directory = write_gguf_tokenizer(path, tmp_path / "cache")
    codec = load_codec(directory)
    assert codec.eos_token_ids == (trained["eos"],) and codec.chat_template == TEMPLATE
    assert codec.encode("the", True)[0] != trained["bos"], "the file says so"
    assert [file.name for file in (tmp_path / "cache" / "tokenizers").iterdir()] == [directory.name]
    kept = directory / "tokenizer.json"
    written = kept.stat().st_mtime_ns
    assert write_gguf_tokenizer(path, tmp_path / "cache") == directory and kept.stat().st_mtime_ns == written
    assert write_gguf_tokenizer(write(path, trained, "qwen2"), tmp_path / "cache") != directory


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model: found 'llama' with pre 'qwen2', expected 'gpt2' with one of"),
        ({"pre": "falcon"}, "found 'gpt2' with pre 'falcon'"),
        ({"pre": None}, "found 'gpt2' with pre ''"),
        ({"bos": 5000}, "tokenizer.ggml.bos_token_id: found 5000, expected one of 290 tokens"),
        ({"types": [1, 1]}, "tokenizer.ggml.token_type: found 2, expected 290"),
        ({"merges": ["the cat"]}, "tokenizer.ggml.merges: "),
        ({"merges": [1]}, "tokenizer.ggml.merges: found none, expected a list of texts"),
    ],
)
def test_what_cannot_be_read_is_named(
    changes: dict[str, Any], said: str, trained: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "tiny.gguf", trained, **({"pre": "qwen2"} | changes))
    with pytest.raises(CheckpointError) as error:
        write_gguf_tokenizer(path, tmp_path / "cache")
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value)
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == [], "nothing half written stays"


@pytest.mark.slow
def test_a_tokenizer_beside_the_file_or_a_given_one_comes_first(
    trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = weights_file(Path(cache_directory()))
    if not path.is_file():
        pytest.skip("the default model is not there yet")
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(tmp_path / "cache"))
    linked = tmp_path / "model.gguf"
    linked.symlink_to(path)
    own = resolve_model(EngineConfig(model_path=str(linked))).tokenizer_dir
    assert own is not None and own.startswith(str(tmp_path / "cache"))
    given = resolve_model(EngineConfig(model_path=str(linked), tokenizer_path=str(DATA))).tokenizer_dir
    assert given == str(DATA)
    (tmp_path / "tokenizer.json").symlink_to(DATA / "tokenizer.json")
    assert resolve_model(EngineConfig(model_path=str(linked))).tokenizer_dir == str(tmp_path)
    skipping = EngineConfig(model_path=str(linked), skip_tokenizer_init=True)
    assert resolve_model(skipping).tokenizer_dir is None
