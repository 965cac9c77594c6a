"""Compare a wheel with the source it was built from: every file of the packages, and no other.

    python wheel_contents.py WHEEL SOURCE

SOURCE is a copy of the tracked files in which nothing has been built or run. Documentation stays out of the wheel.
"""

import sys
import zipfile
from pathlib import Path

PACKAGES = {"overlap_spec": ".", "overlap_spec_kernels": "kernels"}  # name -> its folder in the source
DOCUMENTATION = {".md"}


def source_files(source: Path) -> set[str]:
    """Files of the packages, by their names in a wheel."""
    roots = [(source / folder, name) for name, folder in PACKAGES.items()]
    files = [(path, root) for root, name in roots for path in (root / name).rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix() for path, root in files if path.suffix not in DOCUMENTATION}


def wheel_files(wheel: Path) -> set[str]:
    """Files of the wheel, less its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    return {name for name in names if not name.split("/")[0].endswith(".dist-info")}


def main(wheel: str, source: str) -> int:
    """Returns the exit status: 1 if the two differ."""
    expected, found = source_files(Path(source)), wheel_files(Path(wheel))
    for name in sorted(expected - found):
        print(f"{name}: is in the source, and the wheel lacks it (see [tool.setuptools] in pyproject.toml)")
    for name in sorted(found - expected):
        print(f"{name}: is in the wheel, and no tracked file of a package")
    python = sum(name.endswith(".py") for name in found)
    print(f"{Path(wheel).name}: {python} Python files, {len(found) - python} others; the source has {len(expected)}")
    return int(expected != found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
