"""Reads a JSON object; an error names the file."""

import json
from pathlib import Path
from typing import Any

from overlap_spec.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Raises: CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
