"""The live audit on a GPU, with graphs of its own, in float32: margins of wrong tokens are far beyond rounding."""

import pytest
import torch
from support.storm import run_seeds

from overlap_spec.config import AuditSettings
from overlap_spec.tokenizer.codec import TextCodec

PLACE = torch.device("cuda", 0)


@pytest.mark.parametrize("graphs", [(1, 2, 4, 6), ()], ids=["graphs", "eager"])
def test_audits_of_a_storm_find_nothing(codec: TextCodec, graphs: tuple[int, ...]) -> None:
    engine = {"place": PLACE, "dtype": torch.float32, "graph_batch_sizes": graphs, "audit": AuditSettings(1.0)}
    assert run_seeds(range(8), codec, engine)["audited_tokens"] > 100
