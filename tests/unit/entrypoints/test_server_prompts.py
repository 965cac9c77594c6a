"""Token ids of a body: what is taken, and how it is packed."""

import struct
from typing import Any

import msgspec
import pytest
from support.fake_engine_client import INFO

from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.openai.prompts import read_ids

LAST = 2**31 - 1


@pytest.mark.parametrize("ids", [[0], [LAST], [1, 128, 1 << 24, 127 << 24, LAST, 0] * 50])
def test_ids_are_packed_as_they_are(ids: list[int]) -> None:
    assert read_ids(ids, "prompt", INFO, cut=True).ids == struct.pack(f"<{len(ids)}i", *ids)


@pytest.mark.parametrize("bad", [-1, -LAST - 1, LAST + 1, 2**32, 2**64, True, 1.0, None, "1", [1]])
@pytest.mark.parametrize("place", [0, 3])
def test_what_is_no_token_id_is_named_with_its_place(bad: Any, place: int) -> None:
    ids = [5, 6, 7, 8]
    ids[place] = msgspec.json.decode(msgspec.json.encode(bad)) if bad != 2**64 else bad
    with pytest.raises(Problem, match=rf"prompt: not a list of token ids: .*\$\[{place}\]") as refused:
        read_ids(ids, "prompt", INFO)
    assert refused.value.status == 400 and refused.value.param == "prompt"


def test_a_prompt_may_be_as_long_as_the_context() -> None:
    """Of which nothing but the prompt is computed."""
    assert len(read_ids([5] * INFO.max_model_len, "prompt", INFO).ids) == 4 * INFO.max_model_len
    with pytest.raises(Problem, match="the prompt has"):
        read_ids([5] * (INFO.max_model_len + 1), "prompt", INFO)
