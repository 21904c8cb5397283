"""Real vLLM takes a version from its trainer's memory: proven bit by bit, and with no byte from the version's file."""

from __future__ import annotations

import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.harness.gateways import run_gateway, settings_for
from tests.harness.models import probe_of, save_model
from tests.harness.programs import sender_of
from tests.harness.vllm import SharedEngine
from tests.harness.weights import write_manifest_of_pieces
from trainer.publish.shown import ShownVersion

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
FILE = "model.safetensors"


async def test_vllm_holds_the_version_that_was_in_the_trainers_memory(
    vllm: SharedEngine, tmp_path: Path
) -> None:
    base, source, folder = tmp_path / "base", tmp_path / "source", tmp_path / "weights" / "v000001"
    save_model(base, 0, endless=True)
    save_model(source, 1, endless=True)
    shutil.copytree(source, folder)
    write_manifest_of_pieces(folder, 1, 0, probe_of(source, base))
    sent = tmp_path / "sent"
    shutil.copytree(folder.parent, sent)
    shown, sender = ShownVersion(sent, "cpu"), sender_of(sent)
    async with AsyncExitStack() as stack:
        stack.callback(shown.close)
        stack.callback(sender.kill)
        await sender.start()
        shown.fill(load_file(source / FILE))
        shown.show(sent / folder.name)
        (sent / folder.name / FILE).write_bytes(bytes((folder / FILE).stat().st_size))
        values = settings_for(
            base,
            tmp_path,
            engine=vllm.settings | {"transport": "collective"},
            weights={"sources": [sender.url]},
        )
        gateway = await stack.enter_async_context(run_gateway(values, in_process=False))
        record = await gateway.admin.publish(1, str(folder), wait_s=600)
        [report] = record["report"]
        assert (record["state"], report["failure"]) == ("live", "")
        assert (report["proof"]["verdict"], report["probe"]["verdict"]) == ("proven", "passed")
