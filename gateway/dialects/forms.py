"""The forms that requests demand of a reply's content, in OpenAI's fields and in vLLM's. Pure."""

from __future__ import annotations

from typing import Any

from gateway.dialects.request import unsupported
from gateway.dialects.schemas import check_schema
from gateway.render.constraints import ContentForm
from headgate.errors import invalid
from headgate.json_depth import loads_strictly

_OTHER_FORMS = (
    "send 'text', 'json_object' or 'json_schema'; describe any other form in a message and check the reply"
)
_KINDS = {"regex": "regex", "choice": "choice", "grammar": "ebnf"}
"""vLLM's names of forms that are not JSON."""
MAX_CHOICES = 1024
_GUIDED = ("json", "regex", "choice", "grammar")
_FORMS = (*_GUIDED, "json_object")


def any_object(param: str) -> ContentForm:
    """Return the form of any JSON object."""
    return ContentForm("json", {"type": "object"}, param)


def of_response_format(requested: Any, param: str = "response_format") -> ContentForm | None:
    """Return the form that OpenAI's `response_format` requests; None: free text. Raise BadRequest."""
    kind = requested.get("type") if requested is not None else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return any_object(param)
    if kind != "json_schema":
        raise unsupported(param, f"the type {kind!r}", _OTHER_FORMS)
    wrapped = requested.get("json_schema")
    if not isinstance(wrapped, dict):
        raise invalid(f"{param}.json_schema", "must be an object with a name and a schema")
    return of_named_schema(wrapped, f"{param}.json_schema", param)


def of_named_schema(given: dict[str, Any], where: str, param: str) -> ContentForm:
    """Return the form of an object with a `name` and a `schema`, which is at `where`. Raise BadRequest."""
    if not isinstance(given.get("name"), str) or not given["name"]:
        raise invalid(f"{where}.name", "must be a string that is not empty")
    return ContentForm("json", check_schema(given.get("schema"), f"{where}.schema"), param)


def of_vllm(requested: dict[str, Any]) -> ContentForm | None:
    """Return the form that vLLM's `structured_outputs` and `guided_*` name. `requested`: these fields. Raise BadRequest."""
    found = [(f"guided_{kind}", kind, requested[f"guided_{kind}"]) for kind in _GUIDED]
    given = requested["structured_outputs"]
    for kind, value in (given or {}).items():
        if kind not in _FORMS and value is not None and value is not False:
            raise unsupported(f"structured_outputs.{kind}", "this option", f"use one of {', '.join(_FORMS)}")
        if kind in _FORMS and (kind, value) != ("json_object", False):
            found.append((f"structured_outputs.{kind}", kind, value))
    forms = [_form(*each) for each in found if each[2] is not None]
    if given is not None and not any(form.param.startswith("structured_outputs.") for form in forms):
        raise invalid(
            "structured_outputs", f"names no form: give one of {', '.join(_FORMS)}, or leave it out"
        )
    if len(forms) > 1:
        first, second = (form.param for form in forms[:2])
        raise invalid(second, f"{first} requests a form already")
    return forms[0] if forms else None


def _form(param: str, kind: str, value: Any) -> ContentForm:
    if kind == "json_object":
        if value is not True:
            raise invalid(param, "must be true or false")
        return any_object(param)
    if kind == "json":
        return ContentForm("json", check_schema(_read(value, param), param), param)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(t, str) and t for t in value):
            raise invalid(param, "must be a list of texts that are not empty")
        if len(value) > MAX_CHOICES:
            raise invalid(param, f"{len(value)} texts are more than {MAX_CHOICES}: use a regex or a grammar")
    elif not isinstance(value, str) or not value.strip():
        raise invalid(param, "must be a text that is not empty")
    return ContentForm(_KINDS[kind], value, param)  # type: ignore[arg-type]


def _read(value: Any, param: str) -> Any:
    """Return a schema, which may be JSON in a text."""
    if not isinstance(value, str):
        return value
    try:
        return loads_strictly(value)
    except ValueError as error:
        raise invalid(param, f"it is not JSON: {error}") from error


def check_choice(form: ContentForm | None, choice: str) -> None:
    """Raise BadRequest for a form of the content where a tool must be called, so that the reply has none."""
    if form is not None and choice not in ("auto", "none"):
        message = "has no effect: tool_choice demands a call, and such a reply has no content: leave one of them out"
        raise invalid(form.param, message)


def only_one(first: ContentForm | None, second: ContentForm | None) -> ContentForm | None:
    """Return the requested form. Raise BadRequest if both are."""
    if first is not None and second is not None:
        raise invalid(second.param, f"{first.param} requests a form already")
    return first or second
