"""Resolves `--adapt-draft`: which drafts learn from what they serve, and whose requests they may learn from.

A wrong guess costs time and never a token, so a head may learn from anything. But accept lengths and times can tell
what it has learnt. So where clients are kept apart, it learns only from those that are marked in the key file.
"""

from overlap_spec.config.flags import EngineConfig
from overlap_spec.config.settings import AdaptSettings, ApiKeys, IsolationSettings, SpecSettings
from overlap_spec.config.speculation import DraftKind, facts_of
from overlap_spec.errors import ConfigError

FLAG = "adapt_draft"
SHARE = 0.05


def resolve_adapt(
    config: EngineConfig, spec: SpecSettings, isolation: IsolationSettings, keys: ApiKeys, ranks: int, notes: list[str]
) -> AdaptSettings:
    """Raises: ConfigError naming the flag, or the flag that cannot go with it."""
    if not config.adapt_draft:
        for field, given in (("adapt_share", config.adapt_share != SHARE), ("adapt_save", config.adapt_save)):
            if given:
                raise ConfigError(field, "has no effect without --adapt-draft; leave it out, or give that")
        return AdaptSettings(updates=_can_update(spec, keys, ranks))
    if DraftKind.EAGLE_3 not in facts_of(spec.method).draft_kinds or spec.multi_layer:
        raise ConfigError(FLAG, f"an EAGLE-3 head can learn while it serves, and the draft is {spec.method}'s")
    for field, why in _unfit(config, spec, ranks).items():
        if why:
            raise ConfigError(field, f"cannot go with --adapt-draft: {why}")
    names = _names(isolation, keys)
    whose = "all requests" if names is None else f"requests of {', '.join(names)}"
    notes.append(f'the draft learns from the texts of {whose}, unless they say "adapt": false; none reaches a disk')
    if config.adapt_save is not None:
        notes.append(f"a head that has learnt is written to {config.adapt_save}; it can remember what it has read")
    return AdaptSettings(config.adapt_share, names, config.adapt_save, _can_update(spec, keys, ranks))


def learns_from(adapt: AdaptSettings) -> str | None:
    """Whose texts a draft learns from, as `/server_info` tells every client; None: it learns nothing."""
    if not adapt.share:
        return None
    return "texts of all requests" if adapt.names is None else "texts of clients that are marked in the key file"


def _can_update(spec: SpecSettings, keys: ApiKeys, ranks: int) -> bool:
    """Whether `/update_weights_from_disk` is there: it reads the server's disk, so an operator's key must guard it."""
    return keys.admin is not None and DraftKind.EAGLE_3 in facts_of(spec.method).draft_kinds and ranks == 1


def _unfit(config: EngineConfig, spec: SpecSettings, ranks: int) -> dict[str, str]:
    """By flag, why a head cannot learn beside it; "": it can."""
    few_bits = spec.draft_quantization not in (None, "unquant")
    return {
        "speculative_eagle_topk": f"a head learns for chains, got {spec.topk}; use 1" if spec.topk > 1 else "",
        "tp_size": f"a head learns on one device, got {ranks}; use 1" if ranks > 1 else "",
        "speculative_draft_model_quantization": "weights in few bits cannot be written again" if few_bits else "",
        "enable_deterministic_inference": "a step's bits would depend on what was served before"
        if config.enable_deterministic_inference
        else "",
        "speculative_simulate_acc_len": "accept lengths mean nothing" if spec.simulated_accept_lens else "",
        spec.accept.asked_by or "": "tokens then depend on the draft" if spec.accept.asked_by else "",
    }


def _names(isolation: IsolationSettings, keys: ApiKeys) -> tuple[str, ...] | None:
    """Those that are marked. None: none is, clients are not kept apart, and the flag is their consent.

    Raises: ConfigError if they are, and there is no name to learn from.
    """
    if isolation.names and not keys.sharing:
        raise ConfigError(
            FLAG,
            "clients are kept apart, and none is marked as willing to share what it sends: write NAME:KEY adapt in"
            " --api-key-file",
        )
    return keys.sharing or None
