"""Random schedules with captured steps, on a CPU: a replay runs a part again, at fixed places."""

import pytest
from support.random_schedules import run_seeds

from overlap_spec.frontend.codec import TextCodec

BATCH_SIZES = (2, 4)  # of up to 6 slots: larger batches are launched operation by operation
SCHEDULES = range(3, 5)  # between them all of what must happen


@pytest.mark.full_but_every(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "topk"), [("EAGLE3", 1), ("STANDALONE", 1), ("EAGLE3", 3), ("STANDALONE", 3), ("NGRAM", 1)]
)
def test_replayed_steps_answer_as_plain_decoding_does(codec: TextCodec, method: str, topk: int) -> None:
    engine = {"method": method, "topk": topk, "graph_batch_sizes": BATCH_SIZES}
    seen = run_seeds(SCHEDULES, codec, engine)
    assert min(seen[what] for what in ("finished", "accepted", "rejected", "narrow_steps")) > 0, dict(seen)
