"""The two files of tested versions."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTED = ROOT / "constraints.txt"  # on a CPU
CUDA = ROOT / "constraints-cuda.txt"


def pins_of(constraints: Path) -> dict[str, str]:
    """Name -> the one version."""
    lines = [line.partition("#")[0].strip() for line in constraints.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    pins = {name.lower(): version for name, version in pairs}
    assert len(pins) == len(pairs), f"{constraints.name} names a package twice"
    return pins
