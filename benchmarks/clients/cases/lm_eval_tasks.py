"""`lm-eval`: a loglikelihood task and a generate task, through the server and through transformers.

The text is that of this repository's LICENSE. An item of `licence_next` is the beginning of a paragraph and four
continuations, of which the model is to find the likeliest; one of `licence_words` asks for the next words.
Both ways run the same weights in float32, so the numbers are to be equal, item by item.
"""

import sys
from pathlib import Path
from typing import Any

import lm_eval
from checks import arguments, run_checks
from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask

URL, MODEL = arguments()
TOKENIZER, WEIGHTS = sys.argv[3], Path(sys.argv[4])
LICENSE = Path(__file__).resolve().parents[3] / "LICENSE"
NUM_ITEMS, BEGUN_WORDS, NEXT_WORDS, NUM_CHOICES = 16, 24, 8, 4
ROUNDING = 1e-3  # of a sum of log-probs in float32, in nats
SERVER = {
    "model": MODEL,
    "base_url": f"{URL}/v1/completions",
    "tokenizer": TOKENIZER,
    "tokenizer_backend": "huggingface",
    "max_length": 2048,
    "batch_size": 8,
}
TRANSFORMERS = {
    "pretrained": str(WEIGHTS.parent),
    "gguf_file": WEIGHTS.name,
    "tokenizer": TOKENIZER,
    "dtype": "float32",
    "max_length": 2048,
    "batch_size": 4,
    "device": "cpu",
}


def items() -> list[dict[str, Any]]:
    """Paragraphs of the licence, each cut into its beginning and what comes next."""
    paragraphs = [paragraph.split() for paragraph in LICENSE.read_text().split("\n\n")]
    long = [words for words in paragraphs if len(words) >= BEGUN_WORDS + NEXT_WORDS][:NUM_ITEMS]
    nexts = [" ".join(words[BEGUN_WORDS : BEGUN_WORDS + NEXT_WORDS]) for words in long]
    assert len(long) == NUM_ITEMS, len(long)
    return [
        {
            "begun": " ".join(words[:BEGUN_WORDS]),
            "choices": [nexts[(index + other) % NUM_ITEMS] for other in range(NUM_CHOICES)],
            "next": nexts[index],
        }
        for index, words in enumerate(long)
    ]


def task(name: str, **more: Any) -> ConfigurableTask:
    """A zero-shot task of the items."""
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(items())}),
            "test_split": "test",
            "num_fewshot": 0,
            "doc_to_text": "{{begun}}",
            **more,
        }
    )


def tasks() -> list[ConfigurableTask]:
    """The task of each kind."""
    words = f"^\\s*((?:\\S+\\s+){{{NEXT_WORDS - 1}}}\\S+)"
    first_words = {"function": "regex", "regex_pattern": words}
    return [
        task(
            "licence_next",
            output_type="multiple_choice",
            doc_to_choice="choices",
            doc_to_target=0,
            metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
        ),
        task(
            "licence_words",
            output_type="generate_until",
            doc_to_target="{{next}}",
            generation_kwargs={"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
            filter_list=[{"name": "first_words", "filter": [first_words, {"function": "take_first"}]}],
            metric_list=[{"metric": "exact_match"}],
        ),
    ]


def evaluated(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Figures and samples of both tasks."""
    found = lm_eval.simple_evaluate(model=model, model_args=given, tasks=tasks(), bootstrap_iters=0)
    assert found is not None
    return found


def figures(found: dict[str, Any], name: str) -> dict[str, float]:
    """A task's metrics."""
    kept = {key.split(",")[0]: value for key, value in found["results"][name].items() if isinstance(value, float)}
    return {key: round(value, 4) for key, value in kept.items() if "stderr" not in key}


def responses(found: dict[str, Any], name: str) -> list[Any]:
    """What the model answered, in the order of the requests."""
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for response in sample["resps"]]


def loglikelihoods_are_equal() -> dict[str, Any]:
    ours, theirs = (responses(found, "licence_next") for found in FOUND)
    pairs = [(mine[0], other[0]) for mine, other in zip(ours, theirs, strict=True)]
    most = max(abs(mine[0] - other[0]) for mine, other in pairs)
    assert most < ROUNDING, most
    assert all(mine[1] == other[1] for mine, other in pairs), "whether the continuation is greedy"
    return _equal_figures("licence_next") | {"requests": len(pairs), "largest_difference": float(f"{most:.1e}")}


def generated_texts_are_equal() -> dict[str, Any]:
    ours, theirs = (responses(found, "licence_words") for found in FOUND)
    assert ours == theirs, next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
    return _equal_figures("licence_words") | {"requests": len(ours)}


def _equal_figures(name: str) -> dict[str, Any]:
    mine, other = (figures(found, name) for found in FOUND)
    assert mine == other and mine, (mine, other)
    return dict(mine)


if __name__ == "__main__":
    FOUND = evaluated("local-completions", SERVER), evaluated("hf", TRANSFORMERS)
    checks = (loglikelihoods_are_equal, generated_texts_are_equal)
    run_checks({check.__name__: check for check in checks}, ("lm-eval", "transformers", "torch"))
