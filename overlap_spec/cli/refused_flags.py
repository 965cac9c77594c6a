"""SGLang's flags that cannot be honoured here: each is refused with a sentence that says what to do instead."""

import argparse
from collections.abc import Sequence
from typing import Any

from overlap_spec.cli.parser import UsageError

_DENSE = "chooses operations of mixture-of-experts layers, and every model that is supported is dense; leave it out"
_ONE_GPU = "one GPU is used for now, and it needs no such choice; leave it out"
_BOTH = "one choice serves prefill and decode; use --attention-backend"

REFUSED = {
    "--quantization": "no weights are quantised yet; leave it out, and use --dtype bfloat16 or float16 to save memory",
    "--moe-runner-backend": _DENSE,
    "--moe-a2a-backend": _DENSE,
    "--speculative-moe-runner-backend": _DENSE,
    "--speculative-moe-a2a-backend": _DENSE,
    "--prefill-attention-backend": _BOTH,
    "--decode-attention-backend": _BOTH,
    "--enable-dp-attention": _ONE_GPU,
    "--speculative-skip-dp-mlp-sync": _ONE_GPU,
    "--speculative-dflash-block-size": "DFLASH is no method here; use --speculative-num-draft-tokens with another one",
}


class _Refuse(argparse.Action):
    """Raises: UsageError, whatever the value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        raise UsageError(f"{option_string}: {REFUSED[self.option_strings[0]]}")


def add_refused_flags(parser: argparse.ArgumentParser) -> None:
    """They are known, with a value or without, and in no help."""
    for flag in REFUSED:
        parser.add_argument(flag, nargs="?", action=_Refuse, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
