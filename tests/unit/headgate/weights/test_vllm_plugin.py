"""The plugin's worker against a stand-in for vLLM's interfaces: which rank it is, what it loads and in which order.

Real vLLM on the CPU runs the same with one worker (`tests/acceptance/test_updates.py`); several are only here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headgate.weights.manifest import entry_of, plan_of, write_manifest
from headgate.weights.plugin.headgate_transfer.devices import own
from headgate.weights.plugin.headgate_transfer.wire import Sender, TransferError
from trainer.publish.shown import ShownVersion, listing_for

NAME = "model.safetensors"
_PLUGIN = "headgate.weights.plugin.headgate_transfer.vllm_plugin"
WEIGHTS = {"layers.0.weight": torch.arange(6.0), "layers.1.weight": torch.arange(4, dtype=torch.bfloat16)}


class Base:
    """vLLM's `WeightTransferEngine`, as far as the plugin has to do with it."""

    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, rank: int, size: int, copy: int, done: list[str]) -> None:
        self.parallel_config = SimpleNamespace(rank=rank, world_size=size, data_parallel_index=copy)
        self.model_config = SimpleNamespace()
        self.loaded: dict[str, Any] = {}

        def load_weights(tensors: Any) -> None:
            done.append("load")
            self.loaded = {name: tensor.clone() for name, tensor in tensors}

        self.model = SimpleNamespace(load_weights=load_weights)

    def parse_update_info(self, values: dict[str, Any]) -> Any:
        return self.update_info_cls(**values)


@pytest.fixture
def done() -> list[str]:
    """Return the calls of vLLM's own functions, in order."""
    return []


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, done: list[str]) -> Iterator[Any]:
    registered: dict[str, Any] = {}
    factory = SimpleNamespace(_registry=registered, register_engine=registered.__setitem__)
    parts = {
        "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": Base},
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": factory},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda _model: done.append("begin"),
            "finalize_layerwise_reload": lambda _model, _config: done.append("end"),
        },
    }
    for name, values in parts.items():
        at = ""
        for part in name.split("."):
            at = f"{at}.{part}" if at else part
            monkeypatch.setitem(sys.modules, at, sys.modules.get(at) or ModuleType(at))
        vars(sys.modules[name]).update(values)
    monkeypatch.delitem(sys.modules, _PLUGIN, raising=False)
    yield importlib.import_module(_PLUGIN)
    sys.modules.pop(_PLUGIN, None)


@pytest.mark.parametrize("is_shown", [False, True])
def test_every_worker_takes_its_rank_and_loads_between_begin_and_end(
    plugin: Any, done: list[str], tmp_path: Path, is_shown: bool
) -> None:
    """Two copies (data parallel) of an engine of two workers: four ranks in addition to the sender."""
    plugin.register()
    plugin.register()
    folder = tmp_path / "v000007"
    folder.mkdir()
    save_file(WEIGHTS, folder / NAME)
    write_manifest(folder, 7, 6, None)
    plan = plan_of({NAME: entry_of(folder / NAME)})
    memory = ShownVersion(tmp_path, "cpu")
    memory.fill(WEIGHTS)
    memory.show(folder)
    shown = listing_for(folder, "auto", [own()] * 4) if is_shown else None
    sender = Sender(folder, plan, "gloo", "127.0.0.1", 4, 30.0, shown=shown)
    workers = [plugin.CollectiveEngine(rank, 2, copy, done) for copy in (0, 1) for rank in (0, 1)]
    join = plugin.Join(7, sender.backend, "127.0.0.1", sender.port, 5, plan, 30.0, shown=is_shown)
    for worker in workers:
        worker.init_transfer_engine(join)
    assert [worker._receiver._rank for worker in workers] == [1, 2, 3, 4]
    sender.send()
    assert done == [], "nothing of an engine is touched before the update"
    for worker in workers:
        worker.start_weight_update()
        worker.update_weights({"version": 7, "timeout_s": 30.0})
        worker.finish_weight_update()
        assert {name: tensor.tolist() for name, tensor in worker.loaded.items()} == {
            name: tensor.tolist() for name, tensor in WEIGHTS.items()
        }
    assert done == ["begin", "load", "end"] * 4
    memory.close()


def test_a_version_that_was_not_sent_changes_nothing(plugin: Any, done: list[str]) -> None:
    worker = plugin.CollectiveEngine(0, 1, 0, done)
    with pytest.raises(TransferError, match="version 8 was not sent to this engine"):
        worker.update_weights({"version": 8, "timeout_s": 0.1})
    assert done == []
