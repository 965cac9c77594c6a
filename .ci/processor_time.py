"""`processor_time.py COMMAND ..` runs a command and prints its processor seconds beside those of a fixed loop.

Their ratio compares runs on different machines. A child of the command counts once its parent has waited for it.
"""

import resource
import subprocess
import sys
import time

import torch


def loop() -> float:
    """Processor seconds of interpreted Python and of small products, which is what tests mostly do."""
    torch.set_num_threads(1)
    matrix, number = torch.full((256, 256), 1 / 256), 0
    began = time.process_time()
    for i in range(20_000_000):
        number = (number * 31 + i) & 0xFFFF
    for _ in range(2500):
        matrix = matrix @ matrix
    return time.process_time() - began


def main() -> int:
    """The command's status."""
    fixed = loop()
    print(f"calibration loop: {fixed:.2f} s of processor time", flush=True)
    status = subprocess.run(sys.argv[1:], check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = used.ru_utime + used.ru_stime
    print(f"tests: {taken:.0f} s of processor time, {taken / fixed:.0f} calibration loops")
    return status


sys.exit(main())
