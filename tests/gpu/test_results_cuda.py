"""Results leave as they were when their copy was enqueued, however late they arrive or are read."""

import asyncio
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import copy_out
from support.ring import RingConfig, running, tiny_loaded

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.worker.devices import CudaDevice, CudaDownload

pytestmark = pytest.mark.cuda

LATE_CYCLES = 200_000  # about 0.1 ms
LOOKS = 40  # at a result that is there, before it is read
PLACE = torch.device("cuda", 0)
CONFIG = RingConfig(
    max_len=320, num_pages=400, place=PLACE, dtype=torch.float32, graph_batch_sizes=(1, 2, 4), warm=True
)


@pytest.fixture(autouse=True)
def _other_streams_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waits for another begins its own work long after it might."""
    wait = torch.cuda.Stream.wait_event

    def late(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        wait(stream, event)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE_CYCLES)

    monkeypatch.setattr(torch.cuda.Stream, "wait_event", late)


@pytest.mark.parametrize("shape", [(1, 2), (3, 5), (256, 41)])
def test_copy_out_into_pinned_memory(shape: tuple[int, ...]) -> None:
    source = torch.randint(-(2**62), 2**62, shape, device=PLACE)
    pinned = torch.full(shape, -5).pin_memory()
    copy_out(source, pinned)
    torch.cuda.synchronize()
    assert torch.equal(pinned, source.cpu())


def test_a_result_is_that_of_its_point_of_the_stream() -> None:
    """Its memory is written again at once, as the next step's layers do."""
    device = CudaDevice(ring=2)
    rows = torch.zeros(3, 5, dtype=torch.int64, device=PLACE)
    beside = torch.zeros(400, dtype=torch.float64, device=PLACE)
    torch.cuda._sleep(100 * LATE_CYCLES)  # the host is far ahead
    downloads = []
    for step in range(300):
        rows.fill_(step)
        beside.fill_(step)
        downloads.append(device.download(rows, beside))
        rows.fill_(-7)
        beside.fill_(-7)
    for step, download in enumerate(downloads):
        assert download.rows() == [[step] * 5] * 3
        (block,) = download.blocks()
        assert set(block.cast("d")) == {float(step)}


def tokens(config: RingConfig, codec: TextCodec) -> list[list[int]]:
    """Of requests that decode for many steps, alone and together."""

    async def serve() -> list[list[int]]:
        models = tiny_loaded(0, config.num_steps, config.dtype, PLACE, config.method, topk=config.topk)
        async with running(models, config, codec) as ring:
            asked = [
                SamplingParams(max_new_tokens=length, temperature=float(i % 2), seed=i, ignore_eos=True)
                for i, length in enumerate((300, 120, 40))
            ]
            answers = await asyncio.gather(*(ring.ask([11, 40 + i, 71], each) for i, each in enumerate(asked)))
            await ring.idle()
            return [answer.token_ids for answer in answers]

    return asyncio.run(serve())


@pytest.mark.parametrize("num_steps", [0, 3])
def test_tokens_of_graphs_are_those_of_launches(
    monkeypatch: pytest.MonkeyPatch, codec: TextCodec, num_steps: int
) -> None:
    """Two steps are in flight, and a result is read long after it is there: the next step has run."""
    expected = tokens(replace(CONFIG, num_steps=num_steps, graph_batch_sizes=()), codec)
    ready, looks = CudaDownload.ready, dict[int, int]()

    def late(download: CudaDownload) -> bool:
        if not ready(download):
            return False
        looks[id(download)] = looks.get(id(download), 0) + 1
        return looks[id(download)] % LOOKS == 0

    monkeypatch.setattr(CudaDownload, "ready", late)
    assert tokens(replace(CONFIG, num_steps=num_steps), codec) == expected
