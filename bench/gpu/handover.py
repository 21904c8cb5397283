"""What handing a version from a trainer to an engine takes, predicted from measured rates. Pure.

Bytes are those of bf16 weights: two for each parameter. Each figure is bytes / rate, summed over the copies that it names; what
else is done (kernels that pack, requests, a pause's own seconds) is left out, so these are lower bounds, and predictions.
"""

from __future__ import annotations

from collections.abc import Mapping

BYTES = {"qwen3-0.6b": 1.19e9, "qwen3-8b": 16.4e9, "qwen3-32b": 65.5e9}
"""Bytes of a version. The rates are of one GPU, which 65.5e9 fit on only where an engine and a trainer take turns."""
COPIES: dict[str, tuple[str, ...]] = {
    "step_waits": ("to_host_pageable_gb_s",),
    "step_waits_ipc": ("on_device_gb_s", "on_device_gb_s", "to_host_pageable_gb_s"),
    "written": ("disk_write_gb_s", "hash_gb_s"),
    "checked_by_gateway": ("hash_gb_s",),
    "pause_from_disk": ("disk_read_gb_s", "to_device_pageable_gb_s"),
    "pause_from_page_cache": ("to_device_pageable_gb_s",),
    "pause_ipc": ("on_device_gb_s",),
    "checked_by_engine_ipc": ("to_host_pageable_gb_s", "hash_gb_s"),
    "wake_level1_and_page_cache": ("to_device_pinned_gb_s", "to_device_pageable_gb_s"),
    "wake_level2_and_shared_memory": ("to_device_pageable_gb_s",),
}
"""The rates through which all bytes go, one after the other, in each part of an update."""


def predicted(rates: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the seconds of each part, by model. `rates`: in GB/s, as the check `machine` measures them."""
    return {
        model: {part: sum(size / 1e9 / rates[rate] for rate in through) for part, through in COPIES.items()}
        for model, size in BYTES.items()
    }
