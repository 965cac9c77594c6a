"""Real weights in float32: the log-likelihood of a text is transformers', as lm-eval asks for it (echo, one token)."""

import asyncio
from pathlib import Path

import pytest
import torch

from overlap_spec import Engine, EngineConfig, SamplingParams
from overlap_spec.client.calls import Completion
from overlap_spec.config import ModelFiles
from overlap_spec.messages import LogProbParams

TEXT = "The sky is blue because air scatters short wavelengths of light more than long ones. Café prices: 12 €."
CLOSE = 1e-4


@pytest.mark.full
def test_a_log_likelihood_is_transformers(files: ModelFiles) -> None:
    transformers = pytest.importorskip("transformers", reason="it is compared with: pip install --group test")
    path = Path(files.weights)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(files.tokenizer_dir)(TEXT).input_ids
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].double().log_softmax(1)
    asked = SamplingParams(max_new_tokens=1, temperature=0.0, log_probs=LogProbParams(top=1, prompt_from=0))

    async def ask() -> Completion:
        async with Engine(EngineConfig(device="cpu", dtype="float32", max_total_tokens=2048)) as engine:
            return await engine.client.complete(ids, asked)

    answer = asyncio.run(ask())
    first, *others = answer.prompt_log_probs
    assert first.log_prob is None and [entry.token_id for entry in answer.prompt_log_probs] == ids
    for position, entry in enumerate([*others, *answer.log_probs]):
        after = expected[position]
        assert entry.log_prob == pytest.approx(float(after[entry.token_id]), abs=CLOSE)
        best = entry.top[0]
        assert best.log_prob == pytest.approx(float(after.max()), abs=CLOSE)
        is_greedy = entry.log_prob == best.log_prob  # lm-eval's comparison
        assert is_greedy == (int(after.argmax()) == entry.token_id)
    total = sum(entry.log_prob for entry in others)
    assert total == pytest.approx(float(expected[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum()), abs=1e-3)
