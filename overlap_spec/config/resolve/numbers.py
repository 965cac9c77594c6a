"""Resolves draft steps, topk and draft tokens: the given numbers, or the defaults of method and model."""

from typing import NamedTuple

from overlap_spec.config import PLAIN, EngineConfig, ModelFiles, facts_of, is_own_method
from overlap_spec.config.speculation import BLOCK_FLAGS
from overlap_spec.errors import ConfigError

# Bounds of the kernels, which this package must not import; a test compares them.
MAX_TOPK = 16  # children of a node
MAX_TREE_TOKENS, MAX_CHAIN_TOKENS = 64, 16  # of a window, root included
FIELDS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
GIVEN = "given"
OF_PRESET = "the default of this alias"
DEEP = {"LlamaForCausalLM": "Llama"}  # architectures whose default is more draft steps
DEEP_SPEC, DEEP_CHAIN, OTHER_SPEC = (5, 4, 8), (5, 1, 6), (3, 1, 4)  # SGLang's; DEEP_CHAIN is for methods without trees
CHAINS_ONLY = (
    *("enable_multi_layer_eagle", "speculative_use_rejection_sampling", "speculative_adaptive_config"),
    "speculative_fuse_ngram",
)


class Numbers(NamedTuple):
    """`counts`: steps, topk, draft tokens."""

    counts: tuple[int, int, int]
    source: str


def resolve_numbers(config: EngineConfig, files: ModelFiles, notes: list[str]) -> Numbers:
    """Resolve the numbers; the user gives all three or none, as in SGLang.

    Raises: ConfigError naming the one that is missing or does not fit.
    """
    window = _window_of_block(config)
    steps, topk, tokens = (getattr(config, field) for field in FIELDS)
    if window is not None:
        if (topk or 1) == 1:
            return Numbers((window - 1, 1, window), GIVEN)
        steps = window - 1
    if steps is None and topk is None and tokens is None:
        return _default_numbers(config, files)
    if steps is None or topk is None or tokens is None:
        raise ConfigError(
            next(field for field, number in zip(FIELDS, (steps, topk, tokens), strict=True) if number is None),
            "give --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens"
            " together, or none of them",
        )
    if topk == 1 and tokens != steps + 1:
        notes.append(f"speculative_num_draft_tokens set from {tokens} to {steps + 1}: a chain (topk 1) has steps + 1")
    in_one_forward = facts_of(config.speculative_algorithm or PLAIN).block is not None
    width = steps + 1 if topk == 1 else _tree_width(steps, topk, tokens, in_one_forward, notes)
    return Numbers((steps, topk, width), GIVEN)


def _window_of_block(config: EngineConfig) -> int | None:
    """A chain's window for a block whose rows a flag gives, which has as many steps where guesses are trees.

    Raises: ConfigError naming the flag that does not go with it.
    """
    method = config.speculative_algorithm or PLAIN
    own = facts_of(method).block
    for name, other in BLOCK_FLAGS.items():
        if getattr(config, other.field) is not None and other != own:
            why = f"{method} guesses no blocks" if own is None else f"{method} takes {_flag(own.field)}"
            raise ConfigError(other.field, f"{why}: leave it out, or use --speculative-algorithm {name}")
    if own is None:
        return None
    is_tree = (config.speculative_eagle_topk or 1) > 1
    if is_tree and not own.makes_trees:
        raise ConfigError("speculative_eagle_topk", f"{method} guesses chains: use 1, or leave it out")
    rows: int | None = getattr(config, own.field)
    if rows is None:
        return None
    window = own.window(rows)
    kind, numbers = ("tree", (window - 1,)) if is_tree else ("chain", (window - 1, 1, window))
    for field, only in zip(FIELDS, numbers, strict=False):
        if getattr(config, field) not in (None, only):
            raise ConfigError(field, f"a {kind} of {_flag(own.field)} {rows} has {only}; leave one of them out")
    return window


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _tree_width(steps: int, topk: int, tokens: int, in_one_forward: bool, notes: list[str]) -> int:
    """The requested draft tokens, root included, but no more than the tree can have.

    The tree has topk children of the root, and at every further level topk children of each of the topk best nodes;
    of every node, if all levels are guessed in one forward.
    """
    most = sum(topk**level for level in range(steps + 1)) if in_one_forward else 1 + topk + (steps - 1) * topk * topk
    if topk > MAX_TOPK:
        raise ConfigError("speculative_eagle_topk", f"at most {MAX_TOPK} children of a node are drawn, got {topk}")
    if min(tokens, most) > MAX_TREE_TOKENS:
        raise ConfigError(
            "speculative_num_draft_tokens", f"a tree has at most {MAX_TREE_TOKENS} nodes, root included, got {tokens}"
        )
    if tokens > most:
        notes.append(
            f"speculative_num_draft_tokens set from {tokens} to {most}: a tree of {steps} steps with topk {topk} has no"
            " more"
        )
    return min(tokens, most)


def _default_numbers(config: EngineConfig, files: ModelFiles) -> Numbers:
    method = config.speculative_algorithm or PLAIN
    if (numbers := facts_of(method).numbers) is not None:
        return Numbers(numbers, f"the default of {method}")
    if files.preset_spec is not None:
        return Numbers(files.preset_spec[1:], OF_PRESET)
    if is_own_method(method):
        return Numbers(OTHER_SPEC, "the default of a method of one's own")
    found = next((name for name in files.config.get("architectures") or () if name in DEEP), None)
    chain = next((field for field in CHAINS_ONLY if getattr(config, field)), None)
    if found is not None and chain is not None:
        return Numbers(DEEP_CHAIN, f"the default for {DEEP[found]}, as a chain for --{chain.replace('_', '-')}")
    if found is not None:
        return Numbers(DEEP_SPEC, f"the default for {DEEP[found]}")
    return Numbers(OTHER_SPEC, "the default for this architecture")
