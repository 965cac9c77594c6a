"""How benchmarks/step_profile.py charges kernels that overlap."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks/step_profile.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_profile", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_that_waits_is_charged_from_the_end_of_the_one_before(script: ModuleType) -> None:
    ran = [script.Ran("b", 2.0, 14.0), script.Ran("a", 0.0, 10.0), script.Ran("c", 20.0, 22.0)]
    report: dict[str, Any] = script.charges(ran, num_steps=1)
    assert {kernel["name"]: kernel["us"] for kernel in report["kernels"]} == {"a": 10.0, "b": 4.0, "c": 2.0}
    assert (report["idle_us"], report["profiled_step_us"], report["nodes"]) == (6.0, 22.0, 3)


def test_charges_and_idle_time_add_up_to_the_step(script: ModuleType) -> None:
    ran = [script.Ran(f"k{i % 3}", 5.0 * i, 5.0 * i + (3 if i % 4 else 11)) for i in range(40)]
    report: dict[str, Any] = script.charges(ran, num_steps=4)
    total = sum(kernel["us"] for kernel in report["kernels"]) + report["idle_us"]
    assert total == pytest.approx(report["profiled_step_us"], abs=0.3)  # each is rounded
    assert sum(kernel["nodes"] for kernel in report["kernels"]) == pytest.approx(10, abs=0.2)
    assert sum(kernel["share"] for kernel in report["kernels"]) < 1
