"""The sampler through torch.compile: `--enable-torch-compile`.

What is left of a step beside the kernels is drawing by temperature, a string of small torch operations; torch.compile
fuses them before they are captured. The last bits of a logit may differ, which decides only between logits that agree
to 15 digits. With top_k, top_p or min_p the sampler runs as it is: what they keep is found by kernels of ours.
"""

import torch
from overlap_spec_kernels import largest_columns
from overlap_spec_kernels.launch import check_making
from overlap_spec_kernels.logits.gumbel_argmax import gumbel_argmax_reference
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.sampling.context import Sampling
from overlap_spec.sampling.sampler import Draw, draw_columns
from overlap_spec.worker.build import Parts

MOST_VARIANTS = 1024  # batch sizes, widths and kinds of sampling; torch's own limit is 8


def attach(parts: Parts) -> None:
    """There is nothing to do in a step: it draws by `draw`."""


def draw(settings: Settings) -> Draw | None:
    """What draws tokens in place of `draw_columns`; None where the flag is not given."""
    return compiled_draw(settings.compile_max_batch) if settings.compile_max_batch else None


def compiled_draw(max_batch: int) -> Draw:
    """`draw_columns`, compiled for each shape when it is first met, which is before the capture.

    Not compiled: larger batches, and filters.
    """
    from torch import _dynamo  # compiling takes a second or more, which the flag has asked for

    _dynamo.config.recompile_limit = MOST_VARIANTS
    _dynamo.config.accumulated_recompile_limit = MOST_VARIANTS
    compiled, met = torch.compile(_unfiltered, fullgraph=True, dynamic=False), set[object]()

    def draw(logits: Tensor, positions: Tensor, sampling: Sampling, token_ids: Tensor) -> Tensor:
        if len(logits) > max_batch or sampling.work.filtered:
            return draw_columns(logits, positions, sampling, token_ids)
        if (shape := (logits.shape, sampling.work.sampled)) not in met:
            check_making("the compiled sampler")
            met.add(shape)
        return compiled(logits, positions, sampling, token_ids)

    return draw


def _unfiltered(logits: Tensor, positions: Tensor, sampling: Sampling, token_ids: Tensor) -> Tensor:
    """`draw_columns` without filters, in torch's operations: the compiler cannot look into a kernel's launch."""
    if not sampling.work.sampled:
        return largest_columns(logits)
    return gumbel_argmax_reference(logits, positions, sampling.temperature, sampling.seed, token_ids)
