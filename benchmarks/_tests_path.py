"""Lets a script of this folder import from tests/. To be imported before what is there; its name sorts so."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
