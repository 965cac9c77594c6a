"""CI tests what a clone would hold: files that git tracks, as they are on disk."""

import subprocess
from pathlib import Path

COPY = Path(__file__).parent.parent.parent / ".ci" / "copy_tracked"


def test_only_tracked_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a folder").mkdir(parents=True)
    for name in ("changed", "deleted", "a folder/kept", "untracked", "product.pyc"):
        (source / name).write_text("before")
    (source / ".gitignore").write_text("*.pyc\n")
    subprocess.run(["git", "init", "--quiet", source], check=True)
    subprocess.run(["git", "add", ".gitignore", "changed", "deleted", "a folder/kept"], cwd=source, check=True)
    (source / "changed").write_text("after")
    (source / "deleted").unlink()
    done = subprocess.run([COPY, source, target], capture_output=True, text=True, check=True)
    copied = {path.relative_to(target).as_posix(): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert copied == {".gitignore": "*.pyc\n", "changed": "after", "a folder/kept": "before"}
    assert done.stderr == "not tracked, not copied: untracked\n"
