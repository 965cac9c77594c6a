"""Columns by slot that the ring's messages carry for features, beside a result's tokens, and those of audits."""

from overlap_spec.messages.extensions import Extension, PackedRows, Rows


class AuditRoom(Extension, frozen=True):
    """Of `WorkerReady` and `EngineLimits`: `num_slots` slots from `first_slot` on are for audits alone.

    So many requests are audited at once; their controls are padded to `control_slots`.
    """

    first_slot: int
    num_slots: int
    control_slots: int


class Replayed(Extension, frozen=True):
    """A step of audits, which know all their tokens: the draft takes no part. Columns are by slot of a decode step.

    Such a step is one column wide and takes nothing from the slots' rows but the pages. The target draws after
    `roots`, the tokens at `positions`, where the tokens `served` came. It is padded to `padded_to` slots.
    """

    positions: list[int] = []
    roots: list[int] = []
    served: list[int] = []
    padded_to: int = 0


class TreePaths(Rows, frozen=True):
    """Of trees. A step of width w would have committed those columns of a path that are below w.

    Without it, windows are chains: column i holds guess i.
    """

    paths: list[list[int]]  # window columns of the accepted guesses
    last_guesses: list[int]  # the last window column with a guess, 0 without one


class GuessReport(Rows, frozen=True):
    """What methods that are self-drafting tell of their guesses: windows are whole whatever the step's width.

    Without it, no slot had a guess.
    """

    levels: list[int]  # of guesses in the whole window; -1: the step before left the draft out, so there is none
    strengths: list[int]  # how many tokens the guesses rest on
    next_columns: list[int]  # the column of the guess after the accepted run that was right, 0 for none


class LogProbRows(PackedRows, frozen=True):
    """Log-probs (`LogProbs.records`) of committed tokens, and of prompt tokens in the plan's chunks."""


class Margins(Rows, frozen=True):
    """Of a decode step of audits, whose `tokens` are those drawn: the margins of those that were served."""

    values: list[float]
