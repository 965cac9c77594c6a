"""`serve` with a model that cannot be read: one sentence, status 2, and nothing started."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.tiny.models import tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.entrypoints.cli import main
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.gguf import read_gguf_config

SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name in SIZES:
        writer.add_uint32(f"llama.{name}", 16)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((2, 16), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(16, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cut(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])


def rewrite(path: Path, **fields: object) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))


def refused(model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `serve` says of a model, which is one sentence."""
    assert main(("serve", "--model", str(model), "--port", "0", "--log-level", "error")) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "Traceback" not in output.err
    return output.err


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: cut(path, 150),
        lambda path: path.write_bytes(b"GGML" + path.read_bytes()[4:]),
        lambda path: cut(path, -70),
    ],
    ids=["header cut", "wrong magic", "tensor beyond the end"],
)
def test_a_damaged_gguf(damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    damage(path)
    assert f"{path}: not a readable GGUF file" in refused(path, capsys)


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("config.json", {"rope_scaling": 5}, "rope_scaling must be null or an object, found 5"),
        ("tokenizer_config.json", {"chat_template": [1]}, "chat_template must be text or a list of named templates"),
    ],
)
def test_fields_of_another_kind(
    file: str, fields: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, tiny_target(1))
    write_tokenizer(tmp_path)
    rewrite(tmp_path / file, **fields)
    assert f"{tmp_path / file}: {said}" in refused(tmp_path, capsys)


def test_bytes_that_are_wrong_anywhere_are_read_or_refused(tmp_path: Path) -> None:
    """Of every byte of the header, some value; what gguf makes of it is never another kind of error."""
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    draw, num_refused = random.Random(0), 0
    for place in range(0, 560, 4):
        path = tmp_path / "damaged.gguf"
        path.write_bytes(content[:place] + draw.randbytes(2) + content[place + 2 :])
        try:
            read_gguf_config(path)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 30
