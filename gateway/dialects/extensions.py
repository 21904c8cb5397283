"""Fields that OpenAI's API does not have, and that vLLM's clients and those of aggregators send to chat and completions.

What headgate has under another name is taken; what it lacks is refused with what to do. Nothing is ignored that would change a
reply.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field

from gateway.dialects.forms import of_vllm
from gateway.dialects.request import Body, Effort, Unsupported, unsupported
from gateway.render.constraints import ContentForm
from headgate.errors import invalid


class EngineFields(Body):
    """vLLM's fields of both APIs."""

    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=1024)

    @property
    def content_form(self) -> ContentForm | None:
        """The form that they request. Raise BadRequest."""
        if self.model_fields_set.isdisjoint(_FORMS):
            return None
        return of_vllm({name: getattr(self, name) for name in _FORMS})


_FORMS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class UsageOptions(Body):
    """OpenRouter's `usage`."""

    include: bool = False


class Switch(Body):
    """`thinking`, as GLM's, DeepSeek's and Kimi's own APIs have it."""

    type: Literal["enabled", "disabled"]


class ReasoningOptions(Body):
    """OpenRouter's `reasoning`."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: Literal[False] | None = None
    """Reasoning is always a part of the response, in a field of its own."""


class ThinkingFields(Body):
    """The names under which clients turn thinking off, or set its effort."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: Switch | None = None
    reasoning: ReasoningOptions | None = None

    def effort_and_thinking(self, effort: Effort | None) -> tuple[Effort | None, bool | None]:
        """Return the effort, and whether to think. `effort`: OpenAI's own field. Raise BadRequest if two fields disagree."""
        if self.model_fields_set.isdisjoint(_THINKING):
            return effort, None
        variables = _variables(self.chat_template_kwargs or {})
        efforts = {
            "reasoning_effort": effort,
            "reasoning.effort": self.reasoning and self.reasoning.effort,
            "chat_template_kwargs.reasoning_effort": variables.get("reasoning_effort"),
        }
        switches = {
            "enable_thinking": self.enable_thinking,
            "thinking": self.thinking and self.thinking.type == "enabled",
            "reasoning.enabled": self.reasoning and self.reasoning.enabled,
            "chat_template_kwargs.enable_thinking": variables.get("enable_thinking"),
            "chat_template_kwargs.thinking": variables.get("thinking"),
        }
        return _agreed(efforts), _agreed(switches)


_THINKING = frozenset(ThinkingFields.model_fields)


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    """Check the variables for a template; null sets none."""
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        where = f"chat_template_kwargs.{name}"
        if name in ("enable_thinking", "thinking"):
            if not isinstance(value, bool):
                raise invalid(where, "must be true or false")
        elif name == "reasoning_effort":
            if value not in get_args(Effort):
                raise invalid(where, f"must be one of {', '.join(get_args(Effort))}")
        elif (name, value) != ("add_generation_prompt", True):
            instead = "a request can set enable_thinking and reasoning_effort; write others into the checkpoint's chat template"
            raise unsupported(where, "this variable", instead)
    return given


def _agreed(requested: dict[str, Any]) -> Any:
    given = {name: value for name, value in requested.items() if value is not None}
    first = next(iter(given), "")
    for name, value in given.items():
        if value != given[first]:
            raise invalid(name, f"it is {value!r}, and {first} is {given[first]!r}: send one of them")
    return given.get(first)


_ROUTING = "leave it out: the gateway chooses the engine"
_SAMPLING = (
    "leave it out: the trainer needs the tokens of the distribution that the other parameters describe"
)
_TOKENS = "read the recorded tokens at GET /admin/v1/episodes/{id}/tokens"
_PROMPT = "the prompt is what the model's template writes: change the messages, or use /v1/completions"

EXTENSIONS: Unsupported = {
    "add_generation_prompt": ((True,), _PROMPT),
    "add_special_tokens": ((False,), _PROMPT),
    "allowed_token_ids": (([],), "use `logit_bias`, or a form in `structured_outputs`"),
    "bad_words": (([],), "use `logit_bias`"),
    "cache_salt": ((), "leave it out: the gateway sets it for each version of the weights"),
    "chat_template": ((), "set it in the checkpoint's tokenizer, and family = 'template'"),
    "continue_final_message": ((False,), "send the whole prompt to /v1/completions"),
    "documents": (([],), "write them into a message"),
    "detokenize": ((True,), _TOKENS),
    "include_reasoning": ((True,), "ignore `reasoning` in the response, or turn thinking off"),
    "include_stop_str_in_output": ((False,), "append the stop string yourself"),
    "kv_transfer_params": ((), _ROUTING),
    "length_penalty": ((1, 1.0), _SAMPLING),
    "logits_processors": (([],), "use `logit_bias`, or a form in `structured_outputs`"),
    "models": (([],), _ROUTING),
    "plugins": (([],), "offer a tool, which your client runs"),
    "priority": ((0,), _ROUTING),
    "prompt_logprobs": ((0,), "a prompt's are not known: request `logprobs` of the reply"),
    "provider": (({},), _ROUTING),
    "request_id": ((), "leave it out: the response's `id` names the call"),
    "return_token_ids": ((False,), _TOKENS),
    "return_tokens_as_token_ids": ((False,), _TOKENS),
    "route": ((), _ROUTING),
    "skip_special_tokens": ((True,), "read the text with its marks at GET /admin/v1/episodes/{id}/tokens"),
    "spaces_between_special_tokens": ((True,), "leave it out"),
    "transforms": (([],), "shorten the conversation before you send it"),
    "truncate_prompt_tokens": ((), "shorten the conversation before you send it"),
    "use_beam_search": ((False,), _SAMPLING),
    "guided_decoding_backend": ((), "leave it out: the engine has one"),
    "guided_whitespace_pattern": ((), "leave it out, or use a regex"),
}
"""What nothing here does, by its name in vLLM's API and in OpenRouter's."""

ELSEWHERE: Unsupported = dict.fromkeys(
    ("chat_template_kwargs", "ignore_eos", "stop_token_ids", *_FORMS), ((), "send it to /v1/chat/completions")
)
"""What chat completions take, and other APIs do not."""
