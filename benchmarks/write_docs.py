"""Write everything that is generated in README.md, docs/ and the kernels' README.

python benchmarks/write_docs.py            changes the files
python benchmarks/write_docs.py --check    writes nothing; the exit status is 1 if a file would change
python benchmarks/write_docs.py --ages     writes nothing; lists results that are older than the code
"""

import argparse
import sys

from documents.age import ages
from documents.figures import shown
from documents.fill import ROOT, generated

from overlap_spec.runtime.source import describe_source


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--ages", action="store_true")
    arguments = parser.parse_args()
    if arguments.ages:
        print(*ages(shown(ROOT), describe_source(), ROOT), sep="\n")
        return 0
    check, stale = arguments.check, 0
    for path, text in generated().items():
        if not path.is_file() or path.read_text() != text:
            stale += 1
            print(f"{path.relative_to(ROOT)}: {'is not current' if check else 'written'}")
            if not check:
                path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
