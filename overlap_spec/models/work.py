"""What a forward of a Llama-shaped model reads and computes, from its loaded weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardWork:
    """See `messages.ForwardShape`, which this becomes once the KV dtype is known."""

    weight_bytes: int = 0
    row_flop: int = 0
    head_flop: int = 0
    pair_flop: int = 0


def llama_work(weight_bytes: int, head_bytes: int, itemsize: int, attention_size: int, num_layers: int) -> ForwardWork:
    """Matrix products only: two operations per weight and row.

    `weight_bytes`: of everything that a forward reads, head included; `attention_size`: query heads x head dim.
    Scores and weighted values are 2 * 2 * attention_size operations a layer for each (row, key).
    """
    return ForwardWork(
        weight_bytes=weight_bytes,
        row_flop=2 * (weight_bytes - head_bytes) // itemsize,
        head_flop=2 * head_bytes // itemsize,
        pair_flop=4 * attention_size * num_layers,
    )
