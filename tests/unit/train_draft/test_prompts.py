"""A file of prompts: what is wrong with one is named, what benchmarks ask is left out, and some are held out."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

import overlap_spec
from overlap_spec.errors import ConfigError
from overlap_spec.train_draft.prompts import BENCHMARKS, benchmark_prompts, last_text, read_prompts

DATA = Path(overlap_spec.__file__).parent / "data" / "prompts"
SHIPPED = DATA / "train10k.jsonl.gz"
OTHERS = Path(__file__).parents[4] / "shared" / "train" / "prompts90k.jsonl.gz"


def written(path: Path, lines: list[Any]) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]}


def test_prompts_are_shuffled_and_some_are_held_out(tmp_path: Path) -> None:
    lines: list[Any] = [*(chat(f"What is {n}?") for n in range(60)), "", {"text": "Once"}]
    found = read_prompts(written(tmp_path / "p.jsonl.gz", lines))
    assert sorted(number for number, _ in found.lines) == [*range(1, 61), 62] and found.num_held_out == 3
    again = read_prompts(written(tmp_path / "q.jsonl", lines))
    assert again.lines == found.lines and again.digest == found.digest, "the same file, packed or not"
    assert read_prompts(tmp_path / "q.jsonl", seed=1).lines != found.lines


BAD = {
    "line 3: Input data was truncated": "{",
    "line 3: Expected `object`, got `array`": "[]",
    "line 3: expected an object with either messages or a text that is not empty": {"text": " "},
    "line 3: expected an object with either messages or a text": {"text": "a", **chat("b")},
    "line 3: Expected `str`, got `int` - at `$.messages[0].content`": {"messages": [{"role": "user", "content": 1}]},
    "line 3: Object missing required field `content`": {"messages": [{"role": "user"}]},
    "line 3: messages: ends with an answer": {"messages": [{"role": "assistant", "content": "Yes."}]},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_line_is_named(message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", [chat("a"), "", BAD[message], chat("b")])
    with pytest.raises(ConfigError, match=rf"--prompts: .*p\.jsonl, {re.escape(message)}"):
        read_prompts(path)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    for content, message in ((b"\x1f\x8b\x08\x00broken", "not a whole .gz file"), (b"plain", "Not a gzipped file")):
        path = tmp_path / "p.jsonl.gz"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"--prompts: .*{message}"):
            read_prompts(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="found 1 prompts, expected at least 2"):
        read_prompts(written(tmp_path / "one.jsonl", [chat("a")]))


def test_what_benchmarks_ask_is_left_out(tmp_path: Path) -> None:
    asked = json.loads((DATA / "chat20.json").read_text())[3]
    lines = [chat("a"), chat(f"  {asked.upper()} "), chat("b")]
    found = read_prompts(written(tmp_path / "p.jsonl", lines))
    assert found.num_left_out == 1 and {number for number, _ in found.lines} == {1, 3}


@pytest.mark.slow
@pytest.mark.parametrize("path", [SHIPPED, OTHERS], ids=["shipped", "shared"])
def test_no_prompt_to_train_with_is_one_of_a_benchmark(path: Path) -> None:
    """Nor is one but for capitals and spaces; of those that do not come along, four are, and are left out."""
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    held_out = benchmark_prompts()
    assert len(held_out) == 20 + 64, "chat20 and peer64"
    found = read_prompts(path)
    assert found.num_left_out == (0 if path == SHIPPED else 4)
    assert len(found.lines) >= 10_000 and not held_out & {last_text(prompt) for _, prompt in found.lines}
    texts = {prompt.messages[-1].content for _, prompt in found.lines}
    asked = [text for name in BENCHMARKS for text in json.loads((DATA / name).read_text())]
    assert not texts & set(asked), "as they are written"
