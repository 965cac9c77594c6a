"""Writes the file that names the commit of a checkout, for a machine that has the files but no git.

    python -m overlap_spec.bench.source

`source.py` of the runtime reads it again.
"""

import sys

from overlap_spec.runtime.source import MANIFEST, root, write_manifest

if __name__ == "__main__":
    try:
        print(f"{MANIFEST}: commit {write_manifest(root())}")
    except RuntimeError as error:
        sys.exit(f"overlap_spec.bench.source: {error}")
