"""The engine inside your own program: start it, stream an answer, stop it.

    python examples/01_chat.py [MODEL] [PROMPT]

MODEL is an alias, a Hugging Face directory, a .gguf file or a hub id; the default is fetched once.
"""

import asyncio
import sys

from overlap_spec import Engine, EngineConfig, SamplingParams


async def main(model: str, question: str) -> None:
    """Ask one question twice: greedily, and sampled with a seed."""
    config = EngineConfig(model_path=model, max_total_tokens=4096, log_level="warning")
    async with Engine(config) as engine:  # three processes start here and are gone after the block
        messages = [{"role": "user", "content": question}]
        greedy = SamplingParams(max_new_tokens=64, temperature=0.0)
        async for delta in engine.generate(messages, greedy):
            print(delta.text, end="", flush=True)
        tokens, steps = delta.usage.completion_tokens, delta.usage.spec_verify_ct
        print(f"\n[{tokens} tokens" + (f", {(tokens - 1) / steps:.2f} per verify step]\n" if steps else "]\n"))

        # The same seed gives the same tokens, whatever else runs and however it is drafted.
        sampled = SamplingParams(max_new_tokens=64, temperature=0.8, seed=7)
        first, again = await asyncio.gather(*(engine.client.complete(messages, sampled) for _ in range(2)))
        print(first.text)
        print(f"[same seed, same tokens: {first.token_ids == again.token_ids}]")


if __name__ == "__main__":
    arguments = sys.argv[1:] + ["smollm2", "Why is the sky blue?"][len(sys.argv) - 1 :]
    asyncio.run(main(*arguments[:2]))
