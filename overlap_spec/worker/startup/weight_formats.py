"""What the start table tells of weights in 8 or 4 bits: their format, or that they were dequantised."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

from overlap_spec.config import Settings
from overlap_spec.config.quantization import QuantizationScheme
from overlap_spec.hub.config_values import read_json
from overlap_spec.hub.quantization import quantization_scheme
from overlap_spec.models.quantization.linear import QuantizedLinear
from overlap_spec.worker.startup.geometry import LoadedModels


def weight_formats(settings: Settings, models: LoadedModels) -> tuple[str, str]:
    """Of target and draft; "" for weights in 16 bits or more."""
    files, spec = settings.model.files, settings.spec
    target = quantization_scheme(files.config, files.weights, files.quantization)
    draft = None
    if spec.draft_path is not None:
        config = read_json(Path(spec.draft_path) / "config.json")
        draft = quantization_scheme(config, spec.draft_path, spec.draft_quantization)
    return (
        _described(target, models.target, settings.model.dtype),
        _described(draft, models.proposer, settings.model.dtype),
    )


def _described(scheme: QuantizationScheme | None, weights: object, dtype: str) -> str:
    if scheme is None:
        return ""
    if any(True for _ in _kept(weights)):
        return str(scheme)
    return f"{scheme.stored.value}, DEQUANTISED to {dtype} while loading: no kernel here multiplies by them"


def _kept(node: object) -> Iterator[QuantizedLinear]:
    """The linears in few bits below a tree of dataclasses and tuples."""
    if isinstance(node, QuantizedLinear):
        yield node
    elif isinstance(node, tuple):
        for child in node:
            yield from _kept(child)
    elif is_dataclass(node):
        for field in fields(node):
            yield from _kept(getattr(node, field.name))
