"""Copies of published versions on this machine's disk, fetched piece by piece from their sources.

Owns `DIR/v000007`, and `DIR/.v000007.partial` while it is fetched. Invariants: a directory `v000007` is complete, every piece
in it matched its hash, and it never changes; an interrupted fetch is resumed; pieces of another local version are copied, not
fetched. A start removes half-deleted versions, and half-fetched versions that are older than the newest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
from blake3 import blake3

from headgate.errors import Unprocessable, WeightsUnavailable
from headgate.http import ERRORS, Session, headers_with
from headgate.weights import delta, folders
from headgate.weights.manifest import (
    FORMAT,
    MANIFEST,
    BadManifest,
    Piece,
    pieces_of,
)
from headgate.weights.tensors import Malformed

log = logging.getLogger(__name__)
_PARTIAL = ".partial"
_AT_ONCE = 4
"""Pieces that are fetched concurrently."""
_MANIFEST_LIMIT = 2**28
_SILENCE_S = 30.0
"""Seconds without data after which the next source is used."""
_FETCH = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENCE_S)
_QUOTED = 500
"""Characters of a mirror's error text."""


class Mirror:
    """The versions of one model under `directory`. Use it with `async with`, at whose end fetches and connections end."""

    def __init__(self, directory: Path, key: str | None = None, bytes_per_s: float | None = None) -> None:
        self.directory = directory
        self.fetched: Counter[str] = Counter()
        """Bytes by where they came from: a source's URL, or "local"."""
        self._http = Session(headers_with(key))
        self._throttle = Throttle(bytes_per_s)
        self._fetches: dict[int, asyncio.Task[Path]] = {}

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(_sweep, self.directory)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._fetches.values():
            task.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)
        await self._http.close()

    def path(self, version: int) -> Path:
        """Return the directory of a version, which may not exist."""
        return self.directory / folders.name_of(version)

    def versions(self) -> dict[int, Path]:
        """Return the versions that are stored completely."""
        return folders.versions_in(self.directory)

    async def fetch(self, version: int, sources: Sequence[str]) -> Path:
        """Fetch a version from the first source that has it, and from the others where that one fails.

        Several callers share one fetch, which continues if one of them is cancelled. Raise WeightsUnavailable if no source has
        it, and Unprocessable for an unusable manifest or bytes with a wrong hash.
        """
        task = self._fetches.get(version)
        if task is None:
            if self.path(version).is_dir():
                return self.path(version)
            task = asyncio.create_task(self._fetch(version, sources), name=f"fetch-of-version-{version}")
            self._fetches[version] = task
            task.add_done_callback(lambda done: self._on_done(version, done))
        return await asyncio.shield(task)

    async def request(self, mirror: str, version: int, sources: Sequence[str]) -> str:
        """Request a fetch of a version from another machine's mirror, however long that takes. Return the path there.

        Raise ValueError, with the mirror's error text, and aiohttp.ClientError.
        """
        url, body = _place(mirror, version), {"sources": list(sources)}
        async with self._http.request("POST", url, json=body) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {text[:_QUOTED]}")
        try:
            return str(json.loads(text)["path"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"its response names no path: {text[:_QUOTED]}") from error

    def _on_done(self, version: int, task: asyncio.Task[Path]) -> None:
        del self._fetches[version]
        if not task.cancelled():
            task.exception()  # asyncio warns of an unretrieved error, and all waiters may be cancelled

    async def prune(self, keep: int, *needed: int | None) -> None:
        """Remove the oldest versions beyond `keep`, but none that is `needed`."""
        await asyncio.to_thread(folders.prune, self.directory, keep, *needed)

    async def _fetch(self, version: int, sources: Sequence[str]) -> Path:
        text = await self._manifest(version, sources)
        pieces, parent = _read(text, version)
        partial = self.directory / f".{folders.name_of(version)}{_PARTIAL}"
        missing = await asyncio.to_thread(_prepare, partial, text, pieces, self._local())
        fetched = [piece for piece in missing if piece.file == delta.NAME]
        if parent in self.versions() and len(fetched) < len(missing):
            await self._fetch_all(version, fetched, partial, sources)
            missing = await asyncio.to_thread(_advance, self.path(parent), partial, pieces, missing)
            fetched += missing
        else:
            fetched = missing
        await self._fetch_all(version, missing, partial, sources)
        whole, came = (sum(piece.size for piece in some) for some in (pieces, fetched))
        self.fetched["local"] += whole - came
        log.info("version %d: %d bytes fetched, %d were here", version, came, whole - came)
        target = self.path(version)
        await asyncio.to_thread(_finish, partial, target)
        return target

    async def _fetch_all(
        self, version: int, missing: Iterable[Piece], partial: Path, sources: Sequence[str]
    ) -> None:
        """Fetch pieces, several concurrently. After a failure the pieces in progress are still stored, for the next fetch."""
        waiting = iter(missing)

        async def fetch_pieces() -> None:
            for piece in waiting:
                await self._fetch_piece(version, piece, partial, sources)

        ended = await asyncio.gather(*(fetch_pieces() for _ in range(_AT_ONCE)), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    async def _manifest(self, version: int, sources: Sequence[str]) -> bytes:
        wrong = []
        for source in sources:
            try:
                return await self._get(f"{_place(source, version)}/{MANIFEST}", None, _MANIFEST_LIMIT)
            except (*ERRORS, ValueError) as error:
                wrong.append(f"{source}: {_text(error)}")
        raise WeightsUnavailable(
            f"version {version}: no source has its manifest ({'; '.join(wrong) or 'none is named'})"
        )

    async def _fetch_piece(self, version: int, piece: Piece, partial: Path, sources: Sequence[str]) -> None:
        wrong, corrupt = [], False
        end = piece.offset + piece.size - 1
        for source in sources:
            await self._throttle.wait_for(piece.size)
            try:
                data = await self._get(
                    f"{_place(source, version)}/{piece.file}", (piece.offset, end), piece.size
                )
            except (*ERRORS, ValueError) as error:
                wrong.append(f"{source}: {_text(error)}")
                continue
            self.fetched[source] += len(data)
            if await asyncio.to_thread(_store, partial, piece, data):
                return
            corrupt = True
            wrong.append(f"{source}: bytes {piece.offset} to {end} do not have the manifest's blake3")
        message = f"version {version}, {piece.file}: no source has usable bytes ({'; '.join(wrong)})"
        raise Unprocessable(message, code="wrong_hash") if corrupt else WeightsUnavailable(message)

    async def _get(self, url: str, span: tuple[int, int] | None, limit: int) -> bytes:
        """Return the body of a response. Raise ValueError if it is longer than `limit`, or not of the span."""
        headers = {"Range": f"bytes={span[0]}-{span[1]}"} if span else {}
        async with self._http.request("GET", url, headers=headers, timeout=_FETCH) as response:
            if response.status != (206 if span else 200):
                raise ValueError(f"HTTP {response.status}")
            data = bytearray()
            async for block in response.content.iter_chunked(2**20):
                data += block
                if len(data) > limit:
                    raise ValueError(f"more than {limit} bytes")
        if span and len(data) != limit:
            raise ValueError(f"{len(data)} bytes in the place of {limit}")
        return bytes(data)

    def _local(self) -> dict[str, tuple[Path, Piece]]:
        """Return the pieces of local versions, with their directories, by their hashes."""
        found = {}
        for path in self.versions().values():
            try:
                pieces = pieces_of(json.loads((path / MANIFEST).read_text())["files"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # a first version without a manifest, or one of format 1
            found.update({piece.blake3: (path, piece) for piece in pieces})
        return found


class Throttle:
    """Spreads bytes over time, so that no more than `bytes_per_s` are requested; None: no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0

    async def wait_for(self, size: int) -> None:
        """Wait until `size` bytes may be requested."""
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        wait = max(0.0, self._free_at - now)
        self._free_at = max(self._free_at, now) + size / self._rate
        await asyncio.sleep(wait)


def _sweep(directory: Path) -> None:
    """Remove partial versions that no fetch will resume."""
    folders.sweep(directory)
    newest = max(folders.versions_in(directory), default=-1)
    for partial in directory.glob(f".*{_PARTIAL}"):
        version = folders.version_of(partial.name.removeprefix(".").removesuffix(_PARTIAL))
        if version is not None and version < newest:
            shutil.rmtree(partial, ignore_errors=True)


def _place(source: str, version: int) -> str:
    return f"{source.rstrip('/')}/versions/{version}"


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _read(text: bytes, version: int) -> tuple[list[Piece], int]:
    """Return the pieces of a manifest, and the version that its delta starts from; -1 if it has none. Raise Unprocessable."""
    try:
        manifest: Any = json.loads(text)
        if manifest["format"] != FORMAT or manifest["version"] != version:
            raise BadManifest(f"it is of format {manifest['format']} and version {manifest['version']}")
        parent = manifest["parent"] if delta.NAME in manifest["files"] else -1
        return pieces_of(manifest["files"]), parent
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unprocessable(f"the manifest of version {version}: {error}", code="bad_manifest") from error


def _prepare(
    partial: Path, manifest: bytes, pieces: Iterable[Piece], local: dict[str, tuple[Path, Piece]]
) -> list[Piece]:
    """Create the files at their size, with the local pieces; return the missing pieces."""
    resumed = partial.is_dir() and _bytes(partial / MANIFEST) == manifest
    if not resumed:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / MANIFEST).write_bytes(manifest)
    missing = []
    for piece in pieces:
        file = partial / piece.file
        file.touch()
        os.truncate(file, max(file.stat().st_size, piece.offset + piece.size))
        if not piece.size or (resumed and _holds(file, piece.offset, piece)):
            continue
        path, here = local.get(piece.blake3, (None, piece))
        if path is None or not _store(partial, piece, _at(path / here.file, here.offset, here.size)):
            missing.append(piece)
    return missing


def _advance(parent: Path, partial: Path, pieces: Sequence[Piece], missing: Iterable[Piece]) -> list[Piece]:
    """Make the files in which pieces are missing from the parent's and the delta; return the pieces that are missing still.

    A delta that is of no use costs nothing but time: every piece is compared with its hash.
    """
    names = {piece.file for piece in missing if piece.file != delta.NAME and (parent / piece.file).is_file()}
    for name in names:
        size = (partial / name).stat().st_size
        shutil.copyfile(parent / name, partial / name)
        os.truncate(partial / name, size)
    try:
        delta.apply(partial / delta.NAME, partial)
    except Malformed as error:
        log.warning("the delta of %s is not used: %s", partial.name, error)
    untouched = [piece for piece in missing if piece.file not in names and piece.file != delta.NAME]
    return untouched + [p for p in pieces if p.file in names and not _holds(partial / p.file, p.offset, p)]


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _at(file: Path, offset: int, size: int) -> bytes:
    """Read up to the requested bytes; fewer, or none, at the end."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)


def _holds(file: Path, offset: int, piece: Piece) -> bool:
    return blake3(_at(file, offset, piece.size)).hexdigest() == piece.blake3


def _store(partial: Path, piece: Piece, data: bytes) -> bool:
    """Write a piece, if it has its hash; return whether it has."""
    if len(data) != piece.size or blake3(data).hexdigest() != piece.blake3:
        return False
    descriptor = os.open(partial / piece.file, os.O_WRONLY)
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], piece.offset + written)
    finally:
        os.close(descriptor)
    return True


def _finish(partial: Path, target: Path) -> None:
    """Flush a complete version to disk and rename it."""
    for path in (*sorted(partial.iterdir()), partial):
        folders.sync(path)
    partial.rename(target)
