"""The whole ring on a GPU, graphs and all: random schedules in float32 (IEEE) against solo plain decoding there."""

import pytest
import torch
from storm import run_storm
from tiny_tokenizer import write_tokenizer

from overlap_spec.tokenizer.codec import TextCodec, load_codec

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

NUM_SCHEDULES = 40


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4, 6)], ids=["eager", "graphs"])
def test_storm(codec: TextCodec, batch_sizes: tuple[int, ...], record_summary) -> None:
    place = torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    seen = run_storm(NUM_SCHEDULES, codec, dtype=torch.float32, place=place, graph_batch_sizes=batch_sizes)
    name = f"storm_h200_{'graphs' if batch_sizes else 'eager'}"
    record_summary(name, {"schedules": NUM_SCHEDULES, **seen}, torch.cuda.get_device_name())
