"""A client's message of one step, row by row."""

from overlap_spec.messages import Finish, LogProbs, TextDeltas
from overlap_spec.tokenizer.open_requests import OpenRequest
from overlap_spec.tokenizer.row_turns import PromptRecords, RowTurns


def add_log_probs(reply: TextDeltas, request: OpenRequest, of_output: LogProbs) -> None:
    """Of the row that was added last, and of a prompt without scored rows if it is the request's first."""
    assert request.log_probs is not None
    reply.log_probs[request.request_id] = of_output
    of_prompt = request.log_probs.first_of_prompt()
    if of_prompt is not None:
        reply.prompt_log_probs[request.request_id] = of_prompt


def put_prompt(turns: RowTurns, request: OpenRequest, uid: int, records: bytes) -> None:
    """Let log-probs of a prompt's chunk wait for their turns, a few tokens for each."""
    if request.log_probs is not None:
        for piece in request.log_probs.pieces_of_prompt(records):
            turns.put(request.owner, uid, PromptRecords(uid, piece))


def prompt_part(request: OpenRequest, records: bytes) -> TextDeltas:
    """A row without tokens, which brings a part of the prompt's log-probs."""
    assert request.log_probs is not None
    request_id = request.request_id
    reply = TextDeltas([request_id], [""], [[]], [None], [request.usage])
    reply.prompt_log_probs[request_id] = request.log_probs.part_of_prompt(records)
    return reply


def add_row(reply: TextDeltas, request: OpenRequest, text: str, token_ids: list[int], finish: Finish | None) -> None:
    """What a request has gained."""
    reply.request_ids.append(request.request_id)
    reply.texts.append(request.opened(text) if request.opening else text)
    reply.token_ids.append(token_ids)
    reply.finishes.append(finish)
    reply.usages.append(request.usage)
