"""A platform of verl for a machine without an accelerator: `VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=tests.harness.verl_cpu`.

verl knows NVIDIA's, AMD's and Huawei's. Its rank on the CPU counts as a GPU for Ray.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed


def _nothing(*_: Any, **__: Any) -> int:
    return 0


_MISSING = (
    *("empty_cache", "ipc_collect", "max_memory_allocated", "max_memory_reserved"),
    *("memory_allocated", "memory_reserved"),
)


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformCUDA):
    """The processor as a device of verl."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        **{name: value for name, value in vars(torch.cpu).items() if not name.startswith("_")},
        **dict.fromkeys(_MISSING, _nothing),
        mem_get_info=lambda: (0, 1),
        get_device_name=lambda: "cpu",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    synchronize = set_device = empty_cache = manual_seed = manual_seed_all = set_allocator_settings = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"


# verl names both backends of torch.distributed, and the CPU's may be named once only.
distributed.get_device_name = lambda: "cuda"
