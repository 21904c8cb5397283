"""Examines the models' folders: checkpoint, tokenizer, chat template, the form of tool calls, tied embeddings."""

from __future__ import annotations

import asyncio

from gateway.doctor.finding import Finding
from gateway.engines.tied_embeddings import stale_heads
from gateway.errors import BadRequest
from gateway.render.renderer import ChatRenderer, check_model, load_renderer
from gateway.sections import ModelSettings
from gateway.settings import ConfigError, Settings


async def examine(settings: Settings) -> list[Finding]:
    """Reads each model's tokenizer and template, as a start of the gateway does."""
    found = []
    for name, model in settings.models.items():
        if model.path is not None:
            loaded = settings.engine_of(name).launch == "vllm"
            found += await asyncio.to_thread(_examine_model, settings, name, model, loaded)
    found += [
        Finding("warning", warning, "untie the embeddings as it says, or accept a restart for each update")
        for warning in await stale_heads(settings)
    ]
    return found or [Finding("ok", "all models are upstream: no checkpoint is read")]


def _examine_model(settings: Settings, name: str, model: ModelSettings, loaded: bool) -> list[Finding]:
    try:
        check_model(name, model, loaded=loaded)
        renderer = load_renderer(name, model, settings.render)
    except ConfigError as error:
        mend = (
            f"name another folder in [models.{name}], or another family: 'template' is the checkpoint's own"
        )
        return [Finding("problem", str(error), mend)]
    found = [Finding("ok", f"{name}: the tokenizer and the template of family {model.family!r} are read")]
    if renderer.form is None:
        what = f"{name}: the vocabulary has no marks of tool calls that headgate knows"
        found.append(
            Finding("warning", what, "agents of this model get tool calls as text; docs/templates.md")
        )
    elif not renderer.call_example:
        what = f"{name}: a tool call that the template writes is not read back in the form {renderer.form.name!r}"
        found.append(
            Finding(
                "warning",
                what,
                f"set [models.{name}] family to that of the model, or 'template'; docs/templates.md",
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
        mend = f"set [models.{name}] family = 'template', unless you want the other form"
        found.append(Finding("warning", what, mend))
    return found


_TALKS = (
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "nothing"},
    ],
)


def _differs(renderer: ChatRenderer, name: str, model: ModelSettings, settings: Settings) -> bool:
    """True if the checkpoint has a chat template, and it writes a conversation in other tokens than the family does."""
    try:
        own = load_renderer(name, model.model_copy(update={"family": "template"}), settings.render)
    except ConfigError:  # it has none
        return False
    return any(_rendered(renderer, talk) != _rendered(own, talk) for talk in _TALKS)


def _rendered(renderer: ChatRenderer, talk: list[dict[str, str]]) -> list[int]:
    try:
        return renderer.render(talk, [])
    except BadRequest:  # a template may refuse a system message
        return []
