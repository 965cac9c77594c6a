"""Write everything that is generated in README.md, docs/ and the kernels' README.

    python benchmarks/write_docs.py [--check]

With --check nothing is written, and the exit status is 1 if a file would change.
"""

import sys

from documents.fill import ROOT, generated


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    check, stale = "--check" in arguments, 0
    for path, text in generated().items():
        if not path.is_file() or path.read_text() != text:
            stale += 1
            print(f"{path.relative_to(ROOT)}: {'is not current' if check else 'written'}")
            if not check:
                path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
