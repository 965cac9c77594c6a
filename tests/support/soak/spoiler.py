"""A logit processor that changes nothing, until a file asks for a fault in the worker that imports it.

The engine's own `--logit-processor` brings it there; the server has no flag for faults. The file is named `spoil`, in
the server's directory for temporary files. Results are wrong until the worker dies of it, or the file is gone.
"""

import tempfile
from pathlib import Path

import msgspec
from torch import Tensor

from overlap_spec.messages import StepResult
from overlap_spec.sampling.context import DrawContext
from overlap_spec.worker.step import StepHandle

NAN_TARGET, NAN_DRAFT, LONG_RUN, OTHER_STEP = "NaN of the target", "NaN of the draft", "a long run", "another step"
FILE = "spoil"
TOO_LONG = [5] * 1000  # tokens in a run


def asked(directory: Path) -> str:
    """The fault that is asked for, or ""."""
    try:
        return (directory / FILE).read_text()
    except FileNotFoundError:
        return ""


def processor(logits: Tensor, context: DrawContext) -> Tensor:
    """The same logits; NaN while the file asks for that. Shapes: [B, R, N] -> [B, R, N]."""
    wanted = NAN_TARGET if context.of_target else NAN_DRAFT
    return logits.fill_(float("nan")) if asked(Path(tempfile.gettempdir())) == wanted else logits


def spoilt(result: StepResult, directory: Path) -> StepResult:
    """The result that leaves the worker: a wrong one if the file asks for it."""
    wanted = asked(directory)
    if wanted not in (LONG_RUN, OTHER_STEP) or not any(result.tokens):
        return result
    if wanted == OTHER_STEP:
        return msgspec.structs.replace(result, step_id=result.step_id + 1)
    return msgspec.structs.replace(result, tokens=[TOO_LONG for _ in result.tokens])


def _spoil_results() -> None:
    """Every step's result of this process passes `spoilt`."""
    wait = StepHandle.wait
    directory = Path(tempfile.gettempdir())
    StepHandle.wait = lambda handle: spoilt(wait(handle), directory)


_spoil_results()
