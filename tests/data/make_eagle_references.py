"""Writes eagle_chains.json: what the written-out EAGLE loop drafts and commits, on 20 prompts of greedy64.json.

    python tests/data/make_eagle_references.py GGUF HEAD_DIR TOKEN_MAP OUTPUT

Float32 on a CPU, greedy, 64 tokens or to the end of the turn; a step's whole run is kept, also past the end. Chains
are named by their number of guesses; those with "mapped" guess only the tokens of the map (FR-Spec).
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from make_eagle3_references import NUM_PROMPTS, NUM_TOKENS, to_end_of_turn
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.reference.eagle import ReferenceHead, generate


def main(gguf: str, head_dir: str, token_map: str, output: str) -> None:
    path, head_path = Path(gguf), Path(head_dir)
    target = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    target.eval()
    config = json.loads((head_path / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(head_path / "model.safetensors").items()}
    embed, lm_head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    prompts = json.loads((Path(__file__).parent / "greedy64.json").read_text())["rows"][:NUM_PROMPTS]
    chains: dict[str, list[object]] = {}
    for num_guesses, ids in ((3, None), (5, None), (3, torch.load(token_map, weights_only=True))):
        rows = []
        for prompt in prompts:
            head = ReferenceHead(tensors, config, embed, lm_head, ids)
            first, steps = generate(target, head, prompt["prompt_ids"], num_guesses, NUM_TOKENS)
            rows.append({"first": first, "steps": [asdict(step) for step in to_end_of_turn(first, steps)]})
        name = f"{num_guesses}" if ids is None else f"{num_guesses} mapped"
        chains[name] = rows
        runs = [len(step["committed"]) for row in rows for step in row["steps"]]
        print(f"{name} steps: accept length {sum(runs) / len(runs):.4f} over {len(runs)} verify steps", flush=True)
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32", "device": "cpu"}
    Path(output).write_text(json.dumps({"made_with": about, "chains": chains}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:5])
