"""What the kernel tells of a process."""

import os
import subprocess
import sys
import time

from overlap_spec.runtime.processes import cpu_seconds


def test_the_cpu_time_of_a_process_grows_with_its_work_alone() -> None:
    own = cpu_seconds(os.getpid())
    assert abs(own - time.process_time()) < 0.1
    begun = time.process_time()
    while time.process_time() - begun < 0.05:
        sum(range(1000))
    assert 0.02 < cpu_seconds(os.getpid()) - own < 0.2
    works = "while time.process_time() < 0.05: pass"  # it starts in less than the ten milliseconds that are told apart
    words = [sys.executable, "-c", f"import time\n{works}\nprint(flush=True)\ntime.sleep(60)"]
    with subprocess.Popen(words, stdout=-1) as idle:
        assert idle.stdout is not None and idle.stdout.readline()
        before, deadline = 0.0, time.monotonic() + 30
        while before != (before := cpu_seconds(idle.pid)):  # it may not have come to its sleep yet
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert before > 0
        idle.kill()
    assert cpu_seconds(idle.pid) == 0.0, "it is gone"
