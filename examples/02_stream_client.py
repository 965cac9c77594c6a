"""A client of a running server, over ZeroMQ: stream, leave early, many requests at once.

overlap-spec serve                                  prints its ZMQ endpoint
python examples/02_stream_client.py ENDPOINT
"""

import asyncio
import sys
from contextlib import aclosing

from overlap_spec import Client, SamplingParams

GREEDY = SamplingParams(max_new_tokens=48, temperature=0.0)


async def leave_early(client: Client) -> None:
    """Stop reading, and the engine stops working: leaving the block cancels the request."""
    endless = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    seen = 0
    async with aclosing(client.generate("Once upon a time", endless)) as deltas:
        async for delta in deltas:
            seen += len(delta.token_ids)
            if seen >= 10:
                break
    print(f"left after {seen} of 1000 tokens")


async def main(endpoint: str) -> None:
    """Connect, ask, and look at what the engine has done."""
    async with Client(endpoint) as client:
        await client.wait_ready(timeout_s=30)
        async for delta in client.generate("The sky is blue because", GREEDY):
            print(delta.text, end="", flush=True)
        print()
        await leave_early(client)
        questions = [f"{number} plus {number} is" for number in range(8)]
        answers = await asyncio.gather(*(client.complete(question, GREEDY) for question in questions))
        print(f"{len(answers)} answers, {sum(len(answer.token_ids) for answer in answers)} tokens")
        await asyncio.sleep(0.5)  # figures are reported when the work has ended, or once a second
        stats = await client.stats()
        print(f"{stats.requests_total} requests so far, {stats.aborted_total} aborted, {stats.steps_total} steps")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
