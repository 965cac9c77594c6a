"""Requests with grammars through a ring with graphs: slots are left out of steps, and tokens are plain decoding's."""

import asyncio
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as replace_struct
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.ring import RingConfig, running, tiny_loaded
from support.tiny.grammars import TINY_GRAMMARS

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams

pytestmark = pytest.mark.cuda

PROMPT = [11, 40, 71, 9, 80, 33]
PLACE = torch.device("cuda", 0)
CONFIG = RingConfig(
    grammars=True, max_len=200, num_slots=6, place=PLACE, dtype=torch.float32, graph_batch_sizes=(1, 2, 4, 6), warm=True
)


def requests() -> list[SamplingParams]:
    grammars = ("compact schema", "regex", "lark", "any object")
    asked = [
        SamplingParams(max_new_tokens=48, temperature=float(i % 2), seed=i, grammar=TINY_GRAMMARS[name])
        for i, name in enumerate(grammars)
    ]
    return [*asked, replace_struct(asked[0], grammar=None, ignore_eos=True)]


def tokens(config: RingConfig, codec: TextCodec) -> tuple[list[list[int]], int]:
    """Of every request, and how many slots were left out of steps."""

    async def serve() -> tuple[list[list[int]], int]:
        models = tiny_loaded(0, config.num_steps, config.dtype, PLACE, config.method, topk=config.topk)
        async with running(models, config, codec) as ring:
            with synchronization_is_an_error():
                answers = await asyncio.gather(*(ring.ask(PROMPT, each) for each in requests()))
                await ring.idle()
            return [answer.token_ids for answer in answers], ring.inbox.sent.left_out

    return asyncio.run(serve())


@sync_mode_warns
@pytest.mark.parametrize("late_s", [0.0, 0.02])
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1), ("NGRAM", 1)])
def test_tokens_are_plain_decodings(codec: TextCodec, method: str, topk: int, late_s: float) -> None:
    plain, _ = tokens(replace(CONFIG, num_steps=0), codec)
    found, left_out = tokens(replace(CONFIG, method=method, topk=topk, late_grammars=late_s), codec)
    assert found == plain
    assert left_out or not late_s
