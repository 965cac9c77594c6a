"""The columns of the matrices: every method, and at which depths. It imports no entry point."""

from documents.result_tables import matrix_row

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

Row = str | dict[str, dict[str, str]]  # outcomes by column and depth; one word for all of them


def with_outcome(row: Row, column: str, depth: int, outcome: str) -> Row:
    """The row of a parameter with another cell."""
    cells = matrix_row(row, [*COLUMNS], DEPTHS)
    cells.setdefault(column, {})[str(depth)] = outcome
    found = [each for of_column in cells.values() for each in of_column.values()]
    is_one_word = len(found) == len(COLUMNS) * len(DEPTHS) and len(set(found)) == 1
    return outcome if is_one_word else cells
