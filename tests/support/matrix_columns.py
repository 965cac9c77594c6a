"""The columns of the matrices: every method, and at which depths. It imports no entry point."""

from support.tiny.methods import MULTI_LAYER

# Columns: the method of `EVERY_METHOD`, and how guesses branch. Plain decoding is what the others are compared with.
COLUMNS: dict[str, tuple[str, int]] = {
    "NONE": ("NONE", 1),
    "EAGLE": ("EAGLE", 1),
    "EAGLE tree": ("EAGLE", 3),
    "EAGLE, token map": ("EAGLE with a token map", 1),
    "EAGLE3": ("EAGLE3", 1),
    "EAGLE3 tree": ("EAGLE3", 3),
    "NEXTN": ("NEXTN", 1),
    "NEXTN tree": ("NEXTN", 3),
    "NEXTN, several layers": (MULTI_LAYER[0], 1),
    "STANDALONE": ("STANDALONE", 1),
    "STANDALONE tree": ("STANDALONE", 3),
    "NGRAM": ("NGRAM of chains", 1),
    "NGRAM tree": ("NGRAM", 1),
}
DEPTHS = (1, 2)
