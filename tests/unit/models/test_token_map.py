"""Token maps are lists of distinct ids of the target, saved by torch; whatever else a file holds is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_spec.errors import CheckpointError
from overlap_spec.models.loading.sources import read_token_map


def saved(path: Path, content: object) -> str:
    torch.save(content, path / "map.pt")
    return str(path / "map.pt")


@pytest.mark.parametrize(
    "content",
    [[5, 0, 9], torch.tensor([5, 0, 9]), torch.tensor([5, 0, 9], dtype=torch.int32)],
    ids=["list", "64", "32"],
)
def test_the_order_of_the_file_is_kept(content: object, tmp_path: Path) -> None:
    ids = read_token_map(saved(tmp_path, content), 10)
    assert ids.tolist() == [5, 0, 9] and ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "the token map is empty"),
        ([1, 10], "found token id 10, expected 0 to 9, the target's vocabulary"),
        ([1, -1], "found token id -1, expected 0 to 9"),
        ([1, 1 << 70], "token ids that no vocabulary holds"),
        ([4, 2, 4], "found token id 4 more than once"),
        ([1, 2.0], "expected a list of token ids .*, found list"),
        ([True, False], "expected a list of token ids .*, found list"),
        ({"ids": [1]}, "expected a list of token ids .*, found dict"),
        (torch.zeros(2, 2, dtype=torch.int64), r"found torch.int64 \[2, 2\]"),
        (torch.zeros(2), r"found torch.float32 \[2\]"),
    ],
)
def test_what_is_no_map_is_refused(content: object, words: str, tmp_path: Path) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(CheckpointError, match=f"map.pt: .*{words}"):
        read_token_map(path, 10)


def test_a_file_that_holds_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    path = saved(tmp_path, [Trap()])
    with pytest.raises(CheckpointError, match=r"map\.pt: not a torch file of plain token ids"):
        read_token_map(path, 10)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut short"])
def test_files_that_torch_did_not_write(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "map.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"map\.pt: not a torch file"):
        read_token_map(str(tmp_path / "map.pt"), 10)
    with pytest.raises(CheckpointError, match=r"absent\.pt: the token map is missing"):
        read_token_map(str(tmp_path / "absent.pt"), 10)
