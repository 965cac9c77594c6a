"""Writes greedy64.json: transformers' greedy tokens for prompts40.json, with the logit margin of every token.

    python tests/data/make_references.py GGUF TOKENIZER_DIR OUTPUT

Float32 on a CPU. A margin is the gap between the two largest logits: below 1e-3 another order of the same sums
may take the other token, and the tests list such a divergence instead of counting it.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

NUM_TOKENS = 64


def main(gguf: str, tokenizer_dir: str, output: str) -> None:
    path = Path(gguf)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    prompts = json.loads((Path(__file__).parent / "prompts40.json").read_text())
    rows = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        tokens, margins = greedy(model, ids, tokenizer.eos_token_id)
        rows.append({"prompt": prompt, "prompt_ids": ids, "tokens": tokens, "margins": margins})
        print(len(rows), len(tokens), tokenizer.decode(tokens)[:70].replace("\n", " "), flush=True)
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32", "device": "cpu"}
    Path(output).write_text(json.dumps({"made_with": about, "num_tokens": NUM_TOKENS, "rows": rows}) + "\n")


@torch.no_grad()
def greedy(model, ids: list[int], eos: int) -> tuple[list[int], list[float]]:
    """Up to NUM_TOKENS tokens, the end-of-turn token included."""
    cache = transformers.DynamicCache()
    tokens: list[int] = []
    margins: list[float] = []
    inputs = torch.tensor([ids])
    while len(tokens) < NUM_TOKENS and (not tokens or tokens[-1] != eos):
        logits = model(inputs, past_key_values=cache, use_cache=True).logits[0, -1]
        top = logits.topk(2)
        tokens.append(int(top.indices[0]))
        margins.append(round(float(top.values[0] - top.values[1]), 5))
        inputs = torch.tensor([tokens[-1:]])
    return tokens, margins


if __name__ == "__main__":
    main(*sys.argv[1:4])
