"""Writes standalone_chains.json: what the written-out STANDALONE loop drafts and commits, on the prompts of the others.

    python tests/data/make_standalone_references.py GGUF DRAFT_DIR OUTPUT

Float32 on a CPU, greedy, 64 tokens or to the end of the turn; a step's whole run is kept, also past the end.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from make_eagle3_references import NUM_PROMPTS, NUM_TOKENS, to_end_of_turn
from support.reference.standalone import generate


def main(gguf: str, draft_dir: str, output: str) -> None:
    path = Path(gguf)
    target = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    draft = transformers.AutoModelForCausalLM.from_pretrained(draft_dir, dtype=torch.float32)
    prompts = json.loads((Path(__file__).parent / "greedy64.json").read_text())["rows"][:NUM_PROMPTS]
    chains: dict[str, list[object]] = {}
    for num_guesses in (3, 4):
        rows = []
        for prompt in prompts:
            first, steps = generate(target.eval(), draft.eval(), prompt["prompt_ids"], num_guesses, NUM_TOKENS)
            rows.append({"first": first, "steps": [asdict(step) for step in to_end_of_turn(first, steps)]})
        chains[str(num_guesses)] = rows
        runs = [len(step["committed"]) for row in rows for step in row["steps"]]
        print(f"{num_guesses} steps: accept length {sum(runs) / len(runs):.4f} over {len(runs)} verify steps")
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32", "device": "cpu"}
    Path(output).write_text(json.dumps({"made_with": about, "chains": chains}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
