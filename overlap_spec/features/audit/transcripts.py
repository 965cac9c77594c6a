"""What the audit keeps of a request: what was asked, and every step's tokens as they were served."""

from array import array

from overlap_spec.client.link import pack_ids
from overlap_spec.features.audit.messages import Audit
from overlap_spec.messages import Admit


class Transcript:
    """One request that was chosen when it came."""

    def __init__(self, request_id: str, admit: Admit) -> None:
        self.request_id = request_id
        self.admit = admit
        self.output = array("i")  # served: cut where the text is cut
        self.steps: list[tuple[int, int]] = []  # id of each step, and how many of its tokens were served

    def add(self, step_id: int, tokens: list[int]) -> None:
        """A step's tokens were served."""
        self.output.extend(tokens)
        self.steps.append((step_id, len(tokens)))

    @property
    def num_bytes(self) -> int:
        """What it takes of a bounded backlog."""
        grammar = self.admit.sampling.grammar
        of_grammar = 0 if grammar is None else len(grammar.text)
        return len(self.admit.prompt) + 4 * len(self.output) + 16 * len(self.steps) + of_grammar

    @property
    def prompt_len(self) -> int:
        return len(self.admit.prompt) // self.output.itemsize

    def audit(self, control: bool = False) -> Audit:
        """The message that has it run again."""
        return Audit(self.admit, pack_ids(self.output), control)

    def step_of(self, index: int) -> int:
        """The id of the step that committed output token `index`."""
        for step_id, count in self.steps:
            index -= count
            if index < 0:
                return step_id
        raise IndexError("past the last token")
