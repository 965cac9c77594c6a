"""Every launch command of SGLang's page on speculative decoding, with the program's name changed, on tiny checkpoints.

The program is `python3 -m sglang.launch_server` there and `overlap-spec serve` here; nothing else of a command is
touched but the names of models, which `checkpoints` maps to directories. Each must start, or be refused with a sentence
that names the flag and says what to do instead. All are taken from words to a worker that has run every kind of step,
in this process, and are settled for a GPU; three are started for good.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from support.command_line import Service
from support.tiny.eagle import tiny_eagle
from support.tiny.models import VOCAB, tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.mtp import with_mtp
from support.tiny.standalone import tiny_language_draft
from support.tiny.tokenizer import write_tokenizer

from overlap_spec import hub
from overlap_spec.config import EngineConfig, Machine, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.engine import Engine
from overlap_spec.entrypoints import cli
from overlap_spec.entrypoints.cli.flags import engine_config
from overlap_spec.errors import ConfigError
from overlap_spec.worker.build import build
from overlap_spec.worker.startup.warmup import warm_up

GPU = Machine(num_cores=16, has_cuda=True)
FAMILIES = {"llama": {}, "qwen": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}}

LLAMA_2, LLAMA_3 = "meta-llama/Llama-2-7b-chat-hf", "meta-llama/Meta-Llama-3-8B-Instruct"
LLAMA_31, MIMO, QWEN = "meta-llama/Meta-Llama-3.1-8B-Instruct", "XiaomiMiMo/MiMo-7B-RL", "Qwen/Qwen2.5-7B-Instruct"
EAGLE_2, EAGLE_2_OF_3 = "lmsys/sglang-EAGLE-llama2-chat-7B", "lmsys/sglang-EAGLE-LLaMA3-Instruct-8B"
EAGLE_3, SMALL_QWEN = "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B", "Qwen/Qwen2.5-1.5B-Instruct"
FR_SPEC = "thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt"

EAGLE = f"--model {LLAMA_2} --speculative-algorithm EAGLE --speculative-draft-model-path {EAGLE_2}"
MAPPED = (
    f"--model {LLAMA_3} --speculative-algorithm EAGLE --speculative-draft-model-path {EAGLE_2_OF_3}"
    f" --speculative-token-map {FR_SPEC} --dtype float16"
)
EAGLE3 = f"--model {LLAMA_31} --speculative-algorithm EAGLE3 --speculative-draft-model-path {EAGLE_3} --dtype float16"
STANDALONE = f"--model {QWEN} --speculative-algorithm STANDALONE --speculative-draft-model-path {SMALL_QWEN}"
MEMORY = "--mem-fraction-static 0.7 --cuda-graph-max-bs 8 --log-level warning"
OLD_MEMORY = "--mem-fraction 0.6 --cuda-graph-max-bs 2"
COMPILED = "--enable-torch-compile --torch-compile-max-bs"

STARTS = ""
NO_GRAPHS = "--enable-torch-compile: compiles what CUDA graphs capture, and there are none on a CPU; leave it out"


def numbers(steps: int, topk: int, tokens: int) -> str:
    return f"--speculative-num-steps {steps} --speculative-eagle-topk {topk} --speculative-num-draft-tokens {tokens}"


@dataclass(frozen=True)
class Command:
    """What follows the program's name, and what becomes of it: it starts, or is refused with that sentence."""

    flags: str
    on_cpu: str = STARTS
    numbers: tuple[int, int, int] | None = None  # steps, topk and draft tokens, where they are not those of the flags


COMMANDS = {
    "EAGLE-2": Command(f"{EAGLE} {numbers(3, 4, 16)} {MEMORY}"),
    "EAGLE-2 with torch.compile": Command(
        f"{EAGLE} {numbers(3, 4, 16)} {COMPILED} 8 --mem-fraction-static 0.7 --log-level warning", on_cpu=NO_GRAPHS
    ),
    "EAGLE-2 with FR-Spec": Command(f"{MAPPED} {numbers(3, 4, 16)} {MEMORY}"),
    "EAGLE-3": Command(f"{EAGLE3} {numbers(3, 4, 16)} {MEMORY}"),
    "MTP": Command(
        f"--model {MIMO} --host 0.0.0.0 --trust-remote-code --speculative-algorithm EAGLE {numbers(1, 1, 2)} {MEMORY}"
    ),
    "small draft model": Command(f"{STANDALONE} {numbers(4, 2, 7)} {MEMORY}"),
    "small draft model, V2": Command(f"{STANDALONE} {numbers(4, 1, 5)} {MEMORY}"),
    "n-gram": Command(
        f"--model {QWEN} --speculative-algorithm NGRAM --speculative-num-draft-tokens 16"
        f" --speculative-ngram-max-match-window-size 12 --speculative-ngram-max-bfs-breadth 10 {MEMORY}"
    ),
    "out-of-memory recipe": Command(
        f"{EAGLE} {numbers(2, 2, 8)} --cuda-graph-max-bs 2 --mem-fraction-static 0.5 --max-running-requests 4"
        " --dtype float16 --log-level warning",
        numbers=(2, 2, 7),  # two steps with topk 2 make a tree of 7 nodes, root included
    ),
    "older: EAGLE-2": Command(f"{EAGLE.replace('--model', '--model-path', 1)} {numbers(5, 8, 64)} {OLD_MEMORY}"),
    "older: EAGLE-2 with torch.compile": Command(
        f"{EAGLE} {numbers(5, 8, 64)} --mem-fraction 0.6 {COMPILED} 2", on_cpu=NO_GRAPHS
    ),
    "older: EAGLE-2 with FR-Spec": Command(f"{MAPPED} {numbers(5, 8, 64)} {OLD_MEMORY}"),
    "older: EAGLE-3": Command(f"{EAGLE3} {numbers(5, 8, 32)} {OLD_MEMORY}"),
}
STARTED_FOR_GOOD = {"EAGLE-3": {}, "small draft model, V2": {"SGLANG_ENABLE_SPEC_V2": "True"}}
every_command = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny checkpoints by the names of the large ones."""
    root = tmp_path_factory.mktemp("checkpoints")
    llama, qwen = (tiny_target(seed=1, **FAMILIES[family]) for family in ("llama", "qwen"))
    eagle, eagle3 = tiny_eagle(2, llama), tiny_eagle3(2, llama)
    targets = {"llama": llama, "mimo": with_mtp(8, tiny_target(7)), "qwen": qwen}
    drafts = {"eagle": eagle, "eagle3": eagle3, "small": tiny_language_draft(2, qwen, **FAMILIES["qwen"])}
    for name, checkpoint in (targets | drafts).items():
        write_tokenizer(write_checkpoint(root / name, checkpoint))
    torch.save(list(range(VOCAB // 4, VOCAB)), root / "map.pt")
    directories = {
        **dict.fromkeys((LLAMA_2, LLAMA_3, LLAMA_31), "llama"),
        **dict.fromkeys((EAGLE_2, EAGLE_2_OF_3), "eagle"),
        **{MIMO: "mimo", QWEN: "qwen", EAGLE_3: "eagle3", SMALL_QWEN: "small", FR_SPEC: "map.pt"},
    }
    return {name: str(root / directory) for name, directory in directories.items()}


def words_of(command: Command, checkpoints: dict[str, str]) -> list[str]:
    return [checkpoints.get(word, word) for word in shlex.split(command.flags)]


def config_of(command: Command, checkpoints: dict[str, str]) -> EngineConfig:
    """As the command line makes it."""
    words = ["serve", *words_of(command, checkpoints)]
    return engine_config(cli._parser(words).parse_args(words))


@pytest.mark.slow_but_every(8)
@every_command
def test_it_starts_on_a_cpu_or_says_what_to_do_instead(name: str, checkpoints: dict[str, str]) -> None:
    command = COMMANDS[name]
    if command.on_cpu:
        with pytest.raises(ConfigError) as refused:
            Engine(config_of(command, checkpoints))._resolve()
        assert str(refused.value) == command.on_cpu
        return
    settings, _ = Engine(config_of(command, checkpoints))._resolve()
    executor, geometry, _ = build(settings, lambda done, total: None)
    warm_up(executor, geometry)
    executor.close()


@every_command
def test_it_is_settled_for_a_gpu(name: str, checkpoints: dict[str, str]) -> None:
    command = COMMANDS[name]
    config = config_of(command, checkpoints)
    settings: Settings = resolve(config, hub.resolve_model(config), GPU)[0]
    asked = (config.speculative_num_steps, config.speculative_eagle_topk, config.speculative_num_draft_tokens)
    settled = (settings.spec.num_steps, settings.spec.topk, settings.spec.width)
    assert None in asked or settled == (command.numbers or asked)
    assert settings.graph_batch_sizes[-1] == min(config.cuda_graph_max_bs or 48, config.max_running_requests or 48)
    assert settings.compile_max_batch == (config.torch_compile_max_bs or 0)
    assert settings.cache.mem_fraction == config.mem_fraction_static


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED_FOR_GOOD)
def test_it_is_ready_and_answers(name: str, checkpoints: dict[str, str], tmp_path: Path) -> None:
    with Service(tmp_path, *words_of(COMMANDS[name], checkpoints), **STARTED_FOR_GOOD[name]) as service:
        assert service.get("/health_generate").status_code == 200
        assert service.get("/server_info").json()["speculative_numbers_from"] == "given"


@pytest.mark.slow
def test_forced_greedy_verification_is_said_to_be_lossy_and_is_what_happens(
    checkpoints: dict[str, str], tmp_path: Path
) -> None:
    """Hot requests that draw from two tokens: the prompt's is one of two, and what follows is the same for each."""
    sampling = {"temperature": 5.0, "top_k": 2, "max_new_tokens": 24, "ignore_eos": True}
    words = words_of(COMMANDS["n-gram"], checkpoints)
    with Service(tmp_path, *words, SGLANG_NGRAM_FORCE_GREEDY_VERIFY="1") as service:
        assert "LOSSY at temperature > 0" in "\n".join(service.lines)
        info = service.get("/server_info").json()
        assert info["ngram_force_greedy_verify"] is True and "LOSSY" in info["verification"]
        answers = set()
        for seed in range(12):
            body = {"text": "The sky is", "sampling_params": sampling | {"sampling_seed": seed}}
            answers.add(tuple(httpx.post(f"{service.url}/generate", json=body, timeout=30).json()["output_ids"]))
        assert len(answers) == len({tokens[0] for tokens in answers}) == 2
