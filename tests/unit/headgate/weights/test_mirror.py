"""Versions that are fetched over HTTP are those that were written, whatever happens on the way.

The ground truth are the directories themselves, compared byte by byte.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web
from safetensors.numpy import load_file, save_file

from gateway.updates.weights_check import read_weights
from headgate.errors import Unprocessable, WeightsUnavailable
from headgate.weights import delta
from headgate.weights.mirror import Mirror
from tests.harness.mirrors import serving
from tests.harness.waiting import within
from tests.harness.weights import write_manifest_of_pieces

LAYERS = 6


def write(directory: Path, version: int, changed: int = 0) -> Path:
    """Return a version of `LAYERS` tensors, of which the first `changed` are this version's own."""
    folder = directory / f"v{version:06d}"
    folder.mkdir(parents=True)
    arrays = {
        f"layer.{i}": np.random.default_rng(i + 100 * version * (i < changed)).random(5000, np.float32)
        for i in range(LAYERS)
    }
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text('{"layers": 6}')
    (folder / "empty.txt").touch()
    write_manifest_of_pieces(folder, version, None)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_a_version_comes_byte_for_byte(tmp_path: Path) -> None:
    written = write(tmp_path / "a", 1)
    async with serving(tmp_path / "a", "k") as source, Mirror(tmp_path / "b", "k") as mirror:
        found = await mirror.fetch(1, [source])
        assert content(found) == content(written)
        assert read_weights(found, 1).path == str(found)
        assert mirror.fetched[source] == sum(f.stat().st_size for f in written.iterdir()) - len(
            (written / "manifest.json").read_bytes()
        )
        assert await mirror.fetch(1, ["http://127.0.0.1:9"]) == found, (
            "no source is requested for what is here"
        )


async def test_only_pieces_that_no_version_here_has_are_fetched(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    written = write(tmp_path / "a", 2, changed=2)
    async with serving(tmp_path / "a") as source, Mirror(tmp_path / "b") as mirror:
        await mirror.fetch(1, [source])
        mirror.fetched.clear()
        assert content(await mirror.fetch(2, [source])) == content(written)
        assert mirror.fetched[source] == 2 * 5000 * 4


def with_delta(directory: Path, version: int) -> Path:
    """Return a version whose every tensor differs a little from the one before, with its delta."""
    before, folder = directory / f"v{version - 1:06d}", directory / f"v{version:06d}"
    shutil.copytree(before, folder)
    arrays = {name: array.copy() for name, array in load_file(before / "model.safetensors").items()}
    for array in arrays.values():
        array[::50] += 1
    save_file(arrays, folder / "model.safetensors")
    assert delta.write(folder / delta.NAME, before, folder)
    write_manifest_of_pieces(folder, version, version - 1)
    return folder


async def test_a_delta_travels_in_the_place_of_whole_tensors(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    written = with_delta(tmp_path / "a", 2)
    small = (written / delta.NAME).stat().st_size
    assert small < 0.1 * (written / "model.safetensors").stat().st_size
    async with serving(tmp_path / "a") as source, Mirror(tmp_path / "b") as mirror:
        await mirror.fetch(1, [source])
        mirror.fetched.clear()
        assert content(await mirror.fetch(2, [source])) == content(written)
        assert mirror.fetched[source] == small
    async with serving(tmp_path / "b") as second, Mirror(tmp_path / "c") as mirror:
        assert content(await mirror.fetch(2, [second])) == content(written), "without the parent: whole"


@pytest.mark.parametrize("damage", ["parent", "delta", "partial"])
async def test_a_delta_that_does_not_lead_there_is_not_believed(tmp_path: Path, damage: str) -> None:
    """A byte of the copied parent fell over; the delta is of something else; a fetch was cut before."""
    write(tmp_path / "a", 1)
    written = with_delta(tmp_path / "a", 2)
    if damage == "delta":
        (written / delta.NAME).write_bytes(b"no delta")
        write_manifest_of_pieces(written, 2, 1)
    async with serving(tmp_path / "a") as source, Mirror(tmp_path / "b") as mirror:
        mine = await mirror.fetch(1, [source])
        if damage == "parent":
            data = bytearray((mine / "model.safetensors").read_bytes())
            data[-1] ^= 64
            (mine / "model.safetensors").write_bytes(data)
        if damage == "partial":
            partial = tmp_path / "b" / ".v000002.partial"
            shutil.copytree(written, partial)
            (partial / delta.NAME).write_bytes(b"")
            (partial / "model.safetensors").write_bytes((mine / "model.safetensors").read_bytes()[:-5000])
        assert content(await mirror.fetch(2, [source])) == content(written)


async def test_a_fetch_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    written = write(tmp_path / "a", 1)
    whole = sum(f.stat().st_size for f in written.iterdir()) - (written / "manifest.json").stat().st_size
    requested: list[str] = []

    async def dies(request: web.Request) -> web.Response | None:
        if not request.path.endswith("manifest.json"):
            requested.append(request.path)
        return web.Response(status=500) if len(requested) > 3 else None

    async with Mirror(tmp_path / "b") as mirror:
        async with serving(tmp_path / "a", first=dies) as source:
            with pytest.raises(WeightsUnavailable, match="HTTP 500"):
                await mirror.fetch(1, [source])
        assert mirror.versions() == {}
        before = sum(mirror.fetched.values())
        assert 0 < before < whole
        async with serving(tmp_path / "a") as source:
            assert content(await mirror.fetch(1, [source])) == content(written)
            assert mirror.fetched[source] == whole - before


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
async def test_a_byte_that_changed_is_never_taken(tmp_path: Path, file: str) -> None:
    written = write(tmp_path / "a", 1)
    sound = content(write(tmp_path / "sound", 1))
    data = bytearray((written / file).read_bytes())
    data[-3] ^= 1
    (written / file).write_bytes(data)
    async with (
        serving(tmp_path / "a") as bad,
        serving(tmp_path / "sound") as good,
        Mirror(tmp_path / "b") as mirror,
    ):
        with pytest.raises(Unprocessable, match=rf"{file}.*do not have the manifest's blake3"):
            await mirror.fetch(1, [bad])
        assert mirror.versions() == {}
        assert content(await mirror.fetch(1, [bad, good])) == sound, "another source has it"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(version=2),
        lambda m: m.update(format=1),
        lambda m: m["files"].update({"../../evil": m["files"]["config.json"]}),
        lambda m: m["files"]["model.safetensors"].update(size=2**60),
        lambda m: m.pop("files"),
    ],
)
async def test_a_manifest_that_cannot_be_used_is_refused(
    tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    manifest = write(tmp_path / "a", 1) / "manifest.json"
    values = json.loads(manifest.read_text())
    change(values)
    manifest.write_text(json.dumps(values))
    async with serving(tmp_path / "a") as source, Mirror(tmp_path / "b") as mirror:
        with pytest.raises(Unprocessable, match="the manifest of version 1"):
            await mirror.fetch(1, [source])
    assert not (tmp_path / "b").exists()


async def test_callers_share_a_fetch_that_outlives_one_of_them(tmp_path: Path) -> None:
    written = write(tmp_path / "a", 1)
    arrived, go_on = asyncio.Event(), asyncio.Event()
    requested: list[str] = []

    async def waits(request: web.Request) -> None:
        requested.append(request.path)
        arrived.set()
        await go_on.wait()

    async with serving(tmp_path / "a", first=waits) as source, Mirror(tmp_path / "b") as mirror:
        gone, stays = (asyncio.create_task(mirror.fetch(1, [source])) for _ in range(2))
        async with within("the fetch's first request"):
            await arrived.wait()
        gone.cancel()
        await asyncio.wait({gone})
        go_on.set()
        assert content(await stays) == content(written)
        assert requested.count("/versions/1/manifest.json") == 1


async def test_a_source_that_is_away_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path / "a", "right") as source, Mirror(tmp_path / "b", "wrong") as mirror:
        with pytest.raises(
            WeightsUnavailable, match=f"version 3.*{source}: HTTP 401.*127.0.0.1:9: "
        ) as error:
            await mirror.fetch(3, [source, "http://127.0.0.1:9"])
        assert (error.value.status, error.value.code) == (503, "weights_away")


async def test_the_oldest_versions_go_but_none_that_is_needed(tmp_path: Path) -> None:
    for version in range(1, 6):
        write(tmp_path, version)
    async with Mirror(tmp_path) as mirror:
        await mirror.prune(2, 5, 1)
        assert sorted(mirror.versions()) == [1, 4, 5]


async def test_a_start_removes_what_no_fetch_goes_on_with(tmp_path: Path) -> None:
    write(tmp_path, 3)
    for name in (".v000001.gone", ".v000002.partial", ".v000004.partial", ".v000004.tmp-7"):
        (tmp_path / name).mkdir()
    async with Mirror(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {"v000003", ".v000004.partial", ".v000004.tmp-7"}


async def test_a_mirror_is_a_source_for_others(tmp_path: Path) -> None:
    written = write(tmp_path / "a", 1)
    async with (
        serving(tmp_path / "a", "k") as root,
        serving(tmp_path / "b", "k") as second,
        ClientSession() as http,
    ):
        headers = {"Authorization": "Bearer k"}
        async with http.post(f"{second}/versions/1", json={"sources": [root]}, headers=headers) as response:
            assert await response.json() == {"version": 1, "path": str(tmp_path / "b" / "v000001")}
        async with Mirror(tmp_path / "c", "k") as mirror:
            assert content(await mirror.fetch(1, [second])) == content(written)
        async with http.get(f"{second}/versions", headers=headers) as response:
            assert await response.json() == {"versions": [1]}


async def test_what_a_server_refuses(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "a" / "v000001" / "link").symlink_to(tmp_path / "secret.txt")
    headers = {"Authorization": "Bearer k"}
    async with serving(tmp_path / "a", "k") as url, ClientSession() as http:
        for path in ("/versions", "/versions/1/config.json"):
            for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "k"}):
                async with http.get(url + path, headers=given) as response:
                    assert response.status == 401, (path, given)
        for path in (
            "/versions/1/..%2F..%2Fsecret.txt",
            "/versions/1/link",
            "/versions/2/config.json",
            "/versions/1/%2e%2e",
        ):
            async with http.get(url + path, headers=headers) as response:
                assert response.status == 404, path
                assert "secret" not in (await response.text()).replace("secret.txt", "")
        for body in (b"", b"[]", b'{"sources": "http://x"}', b'{"sources": ["file:///etc/passwd"]}', b"\xff"):
            async with http.post(f"{url}/versions/9", data=body, headers=headers) as response:
                assert response.status == 400, body
