"""Writes mtp_chains.json: what the written-out MTP loop drafts and commits, on 20 prompts of greedy64.json.

    python tests/data/make_mtp_references.py GGUF MTP_DIR OUTPUT

Float32 on a CPU, greedy, 64 tokens or to the end of the turn; a step's whole run is kept, also past the end.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from make_eagle3_references import NUM_PROMPTS, NUM_TOKENS, to_end_of_turn
from support.reference.mtp import ReferenceMtp, generate


def main(gguf: str, mtp_dir: str, output: str) -> None:
    path, mtp_path = Path(gguf), Path(mtp_dir)
    target = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    target.eval()
    config = json.loads((mtp_path / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(mtp_path / "model.safetensors").items()}
    embed, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    prompts = json.loads((Path(__file__).parent / "greedy64.json").read_text())["rows"][:NUM_PROMPTS]
    chains: dict[str, list[object]] = {}
    for num_guesses in (3, 5):
        rows = []
        for prompt in prompts:
            mtp = ReferenceMtp(tensors, config, embed, head)
            first, steps = generate(target, mtp, prompt["prompt_ids"], num_guesses, NUM_TOKENS)
            rows.append({"first": first, "steps": [asdict(step) for step in to_end_of_turn(first, steps)]})
        chains[str(num_guesses)] = rows
        runs = [len(step["committed"]) for row in rows for step in row["steps"]]
        print(f"{num_guesses} steps: accept length {sum(runs) / len(runs):.4f} over {len(runs)} verify steps")
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32", "device": "cpu"}
    Path(output).write_text(json.dumps({"made_with": about, "chains": chains}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
