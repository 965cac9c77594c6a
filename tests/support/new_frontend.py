"""Another frontend at a scheduler that stays, and the requests that its clients send it again."""

import random
from array import array

from msgspec.structs import replace

from overlap_spec.client.link import pack_ids
from overlap_spec.frontend.open_requests import UIDS_OF_A_FRONTEND
from overlap_spec.messages import Admit, NewFrontend, Resumed, Usage
from support.fake_device import Bench


def kill_frontend(bench: Bench, rng: random.Random) -> list[Admit]:
    """Another frontend comes. Returns what clients ask it for: up to two of the tokens of each had not reached them."""
    again = []
    for uid in [uid for uid in bench.admits if uid not in bench.finishes]:
        admit, output = bench.admits.pop(uid), bench.tokens.pop(uid)
        output = output[: max(0, len(output) - rng.randrange(3))]
        usage = bench.usages.pop(uid, Usage(0, 0, 0, 0))
        resumed = Resumed(pack_ids(output), usage.cached_tokens, usage.spec_verify_ct) if output else None
        again.append(replace(admit, uid=uid + UIDS_OF_A_FRONTEND, resumed=resumed))
    old, num_limits, num_stats = bench.frontend, len(bench.limits), len(bench.stats)
    bench.deliver(NewFrontend(bench.generation + 1))
    assert bench.frontend is not old and not old.drain()
    assert (len(bench.limits), len(bench.stats) > num_stats) == (num_limits + 1, True)
    assert not bench.scheduler.queues.open and not bench.scheduler.queues.held
    return again


def ask_again(bench: Bench, admits: list[Admit]) -> None:
    for admit in admits:
        bench.admits[admit.uid] = replace(admit, resumed=None)
        bench.tokens[admit.uid] = [] if admit.resumed is None else array("i", admit.resumed.output).tolist()
        if admit.resumed is not None:
            found = Usage(len(admit.prompt) // 4, admit.resumed.cached_tokens, 0, admit.resumed.verify_steps)
            bench.usages[admit.uid] = found
        bench.deliver(admit)
