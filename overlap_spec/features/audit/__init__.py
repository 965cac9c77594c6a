"""The live audit: finished requests are run again by plain decoding, and compared with the tokens that were served.

    frontend --Audit--> scheduler --StepPlan(audit)--> worker     one token a step, along the served tokens
    frontend <-Audited- scheduler <--StepResult(Margins)- worker  what plain decoding would have drawn, and how clearly

A *margin* belongs to one served token: by how much the logits would have to change for plain decoding to draw another
token. It is negative where plain decoding draws another one; its size is then the margin of the difference.
"""

from overlap_spec.messages import Admit, Extension

# --- frontend -> scheduler --------------------------------------------------------------------------------


class Audit(Extension, frozen=True):
    """Run a finished request again. `output`: the tokens that were served, int32, little-endian.

    To learn what the shape of a batch changes: `control`: in steps that are padded to a larger batch; `cut`: with so
    many positions at the prompt's end in a chunk of their own.
    """

    admit: Admit
    output: bytes
    control: bool = False
    cut: int = 0


class StopSpeculating(Extension, frozen=True):
    """Decode plainly from now on: every later decode step is one column wide."""


# --- scheduler -> frontend --------------------------------------------------------------------------------


class Audited(Extension, frozen=True):
    """An audit has ended: for each served token, the one that plain decoding draws (int32) and the margin (float64).

    They begin with token number `first`, and end early where it was given up, for the reason `dropped`.
    """

    uid: int
    drawn: bytes = b""
    margins: bytes = b""
    dropped: str = ""
    first: int = 0


EXTENSIONS = (Audit, StopSpeculating, Audited)
