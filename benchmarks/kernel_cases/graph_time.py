"""How long a call takes on the GPU, without its launch."""

import statistics
from collections.abc import Callable

import torch


def microseconds(call: Callable[[int], object], launches: int, rounds: int) -> float:
    """Of a call, in a CUDA graph of some: the median of replays. Each is given its number in the graph."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            call(index)
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / launches * 1e3)
    return statistics.median(times)
