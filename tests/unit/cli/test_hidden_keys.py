"""What other processes can read of a command line and of an environment has no API key any more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHOWN = """
import json, os, sys
from overlap_spec.config.keys import hide_keys
hide_keys()
seen = [open(f"/proc/self/{name}", "rb").read().decode() for name in ("cmdline", "environ")]
print(json.dumps([seen, sys.argv[1:], os.environ["OVERLAP_SPEC_API_KEY"]]))
"""
KEYS = ("correct horse", "battery=staple", "long-grass", "quiet-pond")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux shows processes in /proc, this system does not")
def test_keys_are_overwritten_and_nothing_else_is() -> None:
    words = ["serve", "--api-key", KEYS[0], "--port", "0", f"--admin-api-key={KEYS[1]}", "--api-key-file", "keys"]
    environment = {"BEFORE": "1", "OVERLAP_SPEC_API_KEY": KEYS[2], "OVERLAP_SPEC_ADMIN_API_KEY": KEYS[3], "AFTER": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, *words], capture_output=True, text=True, check=True, env=environment
    )
    (command, shown), arguments, own = json.loads(done.stdout)
    assert not any(key in command + shown for key in KEYS)
    hidden = [word.replace(KEYS[1], "*" * len(KEYS[1])) for word in words]
    hidden[2] = "*" * len(KEYS[0])
    assert command.rstrip("\0").split("\0")[-len(words) :] == hidden
    assert {"BEFORE=1", "AFTER=2"} <= set(shown.split("\0"))
    assert arguments == words and own == KEYS[2], "the program itself has them"
