"""What of the package a test needs beside the engine: features may be taken away (tests/deletion)."""

import pytest

from overlap_spec import features


def needs_feature(name: str) -> pytest.MarkDecorator:
    """Skips tests of the engine that ask for something of a feature, where that is absent."""
    return pytest.mark.skipif(name in features.absent(), reason=f"{name} is not part of this installation")
