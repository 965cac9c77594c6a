"""The storm on a GPU for targets that are not Llama: biases, norms of heads, windows, in graphs and without."""

import pytest
import torch
from storm import run_storm
from tiny_tokenizer import write_tokenizer

from overlap_spec.tokenizer.codec import TextCodec, load_codec

PLACE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4, 6)], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral with a window"])
def test_storm(codec: TextCodec, family: str, batch_sizes: tuple[int, ...]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    run_storm(30, codec, dtype=torch.float32, place=PLACE, graph_batch_sizes=batch_sizes, family=family)
