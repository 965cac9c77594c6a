"""`python -m overlap_spec`: the command line, where its script is not on the path."""

import sys

from overlap_spec.entrypoints.cli import main

sys.exit(main())
