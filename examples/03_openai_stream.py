"""The official OpenAI client against a running server: nothing but the base URL changes.

overlap-spec serve                                  listens on http://127.0.0.1:30000
python examples/03_openai_stream.py [URL]           needs `pip install openai`
"""

import sys

from openai import OpenAI


def main(url: str) -> None:
    """Stream one answer and print its usage."""
    with OpenAI(base_url=f"{url}/v1", api_key="not-needed-on-loopback") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n[{model}: {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
