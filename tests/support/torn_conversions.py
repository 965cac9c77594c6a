"""A fault of ptxas 12.8 and 12.9, found in SASS.

A conversion to two values of 8 bits fills the lower half of a register and takes the upper half from another one, which
should be zero or a conversion before it:

    F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R30, R30, R85, RZ
    F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R22, R25, R84, R30

Where both halves of a register are the same conversion, ptxas drops the first line and keeps the second, whose upper
half is then whatever lies in a register of that number.
"""

import re

_CONVERSION = re.compile(r"F2FP\.\S*PACK_AB_MERGE_C (R\d+), \S+, \S+, (\w+)")


def conversions_to_8_bits(sass: str) -> list[tuple[str, str]]:
    """The register that each writes, and the one that its upper half comes from."""
    return [(match[1], match[2]) for match in _CONVERSION.finditer(sass)]


def torn_conversions(sass: str) -> list[tuple[str, str]]:
    """Those whose upper half is neither zero nor a conversion before them."""
    halves, torn = {"RZ"}, []
    for target, upper in conversions_to_8_bits(sass):
        if upper not in halves:
            torn.append((target, upper))
        (halves.add if upper == "RZ" else halves.discard)(target)
    return torn
