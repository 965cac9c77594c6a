"""What the tests of the server share."""

from collections.abc import Iterator

import pytest

from overlap_spec.entrypoints.http import app
from overlap_spec.entrypoints.http.request_body import LargeBodies


@pytest.fixture(autouse=True, scope="session")
def shared_decoder() -> Iterator[None]:
    """One process that decodes large bodies for the apps of all tests: each would start its own."""
    shared = LargeBodies()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "LargeBodies", lambda: shared)
        yield
    shared.close()
