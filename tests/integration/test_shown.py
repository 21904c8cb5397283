"""In turn on one machine: an engine that forgot its weights (level 2) wakes with those in its trainer's memory."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from gateway.generation.slot import Slot
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.programs import sender_of
from tests.harness.waiting import LONG_S, until
from tests.harness.weights import fake_weights, probe_of, write_manifest_of_pieces
from trainer.publish.shown import ShownVersion

FILE = "model.safetensors"


async def is_deeply_asleep(gateway: RunningGateway, slot: Slot) -> bool:
    state: dict[str, Any] = await gateway.fake("state", slot)
    return bool(state["asleep"] == 2)


async def test_an_engine_wakes_with_the_version_in_its_trainers_memory(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The bytes of the first version's file are lost once it is live, so it can only come from memory. In the second one's memory
    a byte is flipped: its first attempt is refused, and then it is sent from the file. The probe is the ground truth of both."""
    versions = tmp_path / "weights"
    folders = [tiny_model.resolve(), versions / "v000001", versions / "v000002"]
    for version in (1, 2):
        fake_weights(folders[version], f"weights {version}")
        probe = probe_of(folders[version], folders[version - 1])
        write_manifest_of_pieces(folders[version], version, version - 1, probe)
    stored = load_file(folders[1] / FILE)
    shown = ShownVersion(versions, "cpu")
    async with AsyncExitStack() as stack:
        stack.callback(shown.close)
        sender = sender_of(versions)
        stack.callback(sender.kill)
        await sender.start()
        values = settings_for(
            tiny_model,
            tmp_path,
            engine={"launch": "fake", "count": 1, "transport": "collective", "sleep": "level2"},
            weights={"sources": [sender.url], "transfer_s": 300},
            update={"prove": False},  # the fake engine's proof reads the file
        )
        gateway = await stack.enter_async_context(run_gateway(values, in_process=False))
        [slot] = gateway.model.pool.slots.values()
        for version in (1, 2):
            await gateway.admin.pause_engine(slot.name, LONG_S)
            await until(partial(is_deeply_asleep, gateway, slot), "it sleeps, which begins with its state")
            shown.fill(stored)
            shown.show(folders[version])
            record = await gateway.admin.publish(version, str(folders[version]), wait_s=LONG_S)
            assert record["state"] == "live", record["why"]
            file = folders[version] / FILE
            if version == 1:
                file.write_bytes(b"x" * file.stat().st_size)
            resumed = await gateway.admin.resume_engine(slot.name, LONG_S)
            assert (resumed["state"], resumed["version"]) == ("open", version)
            name = next(iter(stored))
            stored[name] = stored[name] + 1.0
