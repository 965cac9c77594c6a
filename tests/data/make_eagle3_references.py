"""Writes eagle3_chains.json: what the written-out EAGLE-3 loop drafts and commits, on 20 prompts of greedy64.json.

    python tests/data/make_eagle3_references.py GGUF HEAD_DIR OUTPUT

Float32 on a CPU, greedy, 64 tokens or to the end of the turn; a step's whole run is kept, also past the end.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.reference.eagle3 import ReferenceHead, Step, generate

NUM_TOKENS, NUM_PROMPTS, END_OF_TURN = 64, 20, 2


def main(gguf: str, head_dir: str, output: str) -> None:
    path, head_path = Path(gguf), Path(head_dir)
    target = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    target.eval()
    config = json.loads((head_path / "config.json").read_text())
    tensors = load_file(head_path / "model.safetensors")
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    aux_hidden = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    prompts = json.loads((Path(__file__).parent / "greedy64.json").read_text())["rows"][:NUM_PROMPTS]
    chains: dict[str, list[object]] = {}
    for num_guesses in (3, 5):
        rows = []
        for prompt in prompts:
            head = ReferenceHead(tensors, config, target.get_input_embeddings().weight)
            first, steps = generate(target, head, aux_hidden, prompt["prompt_ids"], num_guesses, NUM_TOKENS)
            rows.append({"first": first, "steps": [asdict(step) for step in to_end_of_turn(first, steps)]})
        chains[str(num_guesses)] = rows
        runs = [len(step["committed"]) for row in rows for step in row["steps"]]
        print(f"{num_guesses} steps: accept length {sum(runs) / len(runs):.4f} over {len(runs)} verify steps")
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32", "device": "cpu"}
    Path(output).write_text(json.dumps({"made_with": about, "chains": chains}) + "\n")


def to_end_of_turn(first: int, steps: list[Step]) -> list[Step]:
    """Steps up to the one whose run ends the turn."""
    if first == END_OF_TURN:
        return []
    for i, step in enumerate(steps):
        if END_OF_TURN in step.committed:
            return steps[: i + 1]
    return steps


if __name__ == "__main__":
    main(*sys.argv[1:4])
