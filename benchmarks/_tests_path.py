"""Lets a script of this folder import from tests/. Import it before modules of tests/; its name sorts first."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
