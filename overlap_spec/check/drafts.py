"""How a loaded draft fits its target, in words."""

from overlap_spec.config import SpecSettings
from overlap_spec.models.drafts.eagle3 import Eagle3Weights
from overlap_spec.models.drafts.language_draft import LanguageDraftWeights
from overlap_spec.models.drafts.mtp import MtpWeights
from overlap_spec.spec.drafts import ChainDraft, LoadedProposer, SmallModelDraft, TreeDraft
from overlap_spec.worker.sizing.geometry import LoadedModels


def draft_fits(models: LoadedModels, spec: SpecSettings) -> dict[str, str]:
    """What a draft shares with its target and what it brings; empty if guesses need no weights."""
    draft, target = _weights(models.proposer), models.target
    if draft is None:
        return {}
    profile = models.proposer.profile
    aux = ", ".join(map(str, profile.aux_layers)) or "none: it reads the last hidden states"
    fits = {
        "hidden size": f"{_hidden_size(draft, target.hidden_size)}, of a target of {target.hidden_size}",
        "vocabulary": _vocabulary(draft, target.vocab_size, spec),
    }
    if isinstance(draft, LanguageDraftWeights):
        return fits
    return fits | {"aux layers": f"{aux} of {target.num_layers}", **_norms(draft)}


def _weights(proposer: LoadedProposer) -> object:
    match proposer:
        case TreeDraft():
            return proposer.chain.draft
        case ChainDraft() | SmallModelDraft():
            return proposer.draft
        case _:
            return getattr(proposer, "layers", None)


def _hidden_size(draft: object, of_target: int) -> int:
    match draft:
        case Eagle3Weights():
            return draft.config.llama.hidden_size
        case LanguageDraftWeights():
            return draft.model.hidden_size
        case _:
            return of_target


def _vocabulary(draft: object, vocab_size: int, spec: SpecSettings) -> str:
    guessed = len(getattr(draft, "target_ids", ())) or vocab_size
    if guessed == vocab_size:
        return f"all {vocab_size} tokens of the target"
    by = "the token map" if spec.token_map is not None else "d2t" if isinstance(draft, Eagle3Weights) else "its own"
    return f"{guessed} of the target's {vocab_size} tokens, by {by}"


def _norms(draft: object) -> dict[str, str]:
    """EAGLE-3.1 normalises each aux hidden state before they are fused, and may feed normalised outputs back."""
    if isinstance(draft, MtpWeights) or not isinstance(draft, Eagle3Weights):
        return {}
    norms, fed_back = len(draft.fusion.norms), draft.config.norm_output
    said = f"of {norms} aux hidden states" if norms else "none before the fusion"
    return {"norms (EAGLE-3.1)": said + ("; its output is fed back normalised" if fed_back else "")}
