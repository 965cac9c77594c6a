"""Writes trees.json: what the written-out tree loop drafts and commits with each trained head, on 20 prompts.

    python tests/data/make_tree_references.py GGUF HEADS EAGLE3_HEAD OUTPUT

HEADS is what `--heads` of the tests names. Float32 on a CPU, greedy, 64 tokens of greedy64.json's prompts or to the end
of the turn; a step's whole run is kept, also past the end.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from make_eagle3_references import END_OF_TURN, NUM_PROMPTS, NUM_TOKENS
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.reference import eagle as eagle_reference, eagle3 as eagle3_reference
from support.reference.mtp import ReferenceMtp
from support.reference.trees import Drafter, HeadDrafter, ModelDrafter, Recorded, Shape, generate_trees

SHAPE = Shape(4, 3, 10)


def read_head(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and config."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    return tensors, json.loads((directory / "config.json").read_text())


def drafters(target: Any, heads: Path, eagle3: Path) -> dict[str, Callable[[list[int]], Drafter]]:
    """By the name of the folder: what drafts for a prompt."""
    embed, lm_head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    language_model = transformers.AutoModelForCausalLM.from_pretrained(heads / "standalone", dtype=torch.float32).eval()

    def of_eagle3(prompt: list[int]) -> Drafter:
        head = eagle3_reference.ReferenceHead(*read_head(eagle3), embed)
        return HeadDrafter(head, head.features_of)

    def of_eagle(prompt: list[int]) -> Drafter:
        head = eagle_reference.ReferenceHead(*read_head(heads / "eagle2"), embed, lm_head)
        return HeadDrafter(head, lambda hidden: hidden[-1])

    def of_mtp(prompt: list[int]) -> Drafter:
        return HeadDrafter(ReferenceMtp(*read_head(heads / "mtp"), embed, lm_head), lambda hidden: hidden[-1])

    return {
        "eagle3": of_eagle3,
        "eagle2": of_eagle,
        "mtp": of_mtp,
        "standalone": lambda prompt: ModelDrafter(language_model, prompt),
    }


def main(gguf: str, heads: str, eagle3: str, output: str) -> None:
    path = Path(gguf)
    target = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    target.eval()
    prompts = json.loads((Path(__file__).parent / "greedy64.json").read_text())["rows"][:NUM_PROMPTS]
    by_name = drafters(target, Path(heads), Path(eagle3))
    trees: dict[str, list[object]] = {name: [] for name in by_name}
    for number, prompt in enumerate(prompts):
        ids, num_tokens = prompt["prompt_ids"], len(prompt["tokens"][:NUM_TOKENS])
        recorded = Recorded(target, ids, num_tokens + SHAPE.num_steps + 1)
        for name, drafter in by_name.items():
            first, steps = generate_trees(recorded, drafter(ids), ids, SHAPE, num_tokens)
            trees[name].append({"first": first, "steps": [asdict(step) for step in steps if first != END_OF_TURN]})
        print(f"prompt {number}: {accept_lengths(trees)}", flush=True)
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32", "device": "cpu"}
    Path(output).write_text(json.dumps({"made_with": about, "shape": SHAPE, "trees": trees}) + "\n")


def accept_lengths(trees: dict[str, list[Any]]) -> dict[str, float]:
    """Committed tokens of a step, so far."""
    runs = {name: [len(step["committed"]) for row in rows for step in row["steps"]] for name, rows in trees.items()}
    return {name: round(sum(lengths) / len(lengths), 4) for name, lengths in runs.items()}


if __name__ == "__main__":
    main(*sys.argv[1:5])
