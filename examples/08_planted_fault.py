"""A fault to plant, to see the audit report it: logits that depend on how many guesses a step verifies.

PYTHONPATH=examples overlap-spec verify --logit-processor 08_planted_fault:planted        reports faults, status 1
"""


def planted(logits, context):
    """In a verify step every token gets the logit of its neighbour in the vocabulary; plain decoding is left alone."""
    return logits if context.depth == 0 else logits.roll(1, -1)
