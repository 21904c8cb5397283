"""Detection of a template's switches, and the prompts rendered with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from gateway.config import ModelSettings
from gateway.render.renderer import ChatRenderer
from gateway.render.template_options import EFFORTS, NONE, Switches, choose_switches
from tests.families.family import named, renderer, save
from tests.harness.models import save_tokenizer
from tests.harness.templates import EFFORT_TEMPLATE

TALK = [{"role": "user", "content": "hi"}]
OFF = Switches(thinking=False)


def with_template(directory: Path, template: str, **values: bool) -> ChatRenderer:
    save_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(directory))
    return ChatRenderer.load(ModelSettings(path=directory, family="template", **values))


@pytest.mark.parametrize("name", ["qwen3", "qwen3 (library)", "glm4.5", "glm4.5 (library)"])
def test_little_effort_is_no_thinking(name: str, tmp_path: Path) -> None:
    """The prompt equals that of a renderer loaded with thinking off."""
    family = named(name)
    save(family, tmp_path)
    model = ModelSettings(path=tmp_path, family=family.family)
    chat = ChatRenderer.load(model)
    never = ChatRenderer.load(model.model_copy(update={"thinking": False}))
    for effort in ("none", "minimal"):
        assert chat.switches(effort, None) == chat.switches(None, False) == OFF
        assert never.switches(effort, False) == NONE, "there is nothing to turn off"
    switched = chat.switched(OFF)
    prompt = switched.render(TALK, [])
    assert prompt == never.render(TALK, []) != chat.render(TALK, [])
    reply = [*chat.encode("so"), *[t for t in sorted(chat.marks.stop) if chat.decode([t]) == family.eos]]
    history, again = np.asarray([*prompt, *reply], np.int32), [{"role": "user", "content": "ho"}]
    extended = switched.bridge(history, len(prompt), again, [])
    assert extended == never.bridge(history, len(prompt), again, [])
    assert chat.switches("high", None) == chat.switches("high", True) == NONE


@pytest.mark.parametrize(
    "name", ["llama3", "llama3 (library)", "mistral v7", "gemma3", "deepseek v3 (library)"]
)
def test_a_template_without_switches_has_none(name: str) -> None:
    chat = renderer(name)
    assert {chat.switches(effort, thinking) for effort in EFFORTS for thinking in (None, False)} == {NONE}
    assert chat.switched(NONE) is chat


def test_an_effort_that_the_template_knows_is_given_to_it(tmp_path: Path) -> None:
    chat = with_template(tmp_path, EFFORT_TEMPLATE)
    for effort in ("low", "high"):
        switches = chat.switches(effort, None)
        assert switches.variables == {"reasoning_effort": effort}
        text = chat.decode(chat.switched(switches).render(TALK, []))
        assert text.startswith(f"<|im_start|>system\nReasoning: {effort}<|im_end|>")
    for effort in ("medium", "max", "none", None):
        assert chat.switches(effort, None) == NONE, "what it does anyway, or refuses"


def test_an_effort_and_no_thinking_together() -> None:
    both = Switches(False, "none")
    assert choose_switches("none", None, {both, OFF}) == both
    assert choose_switches("none", None, {OFF, Switches(None, "none")}) == Switches(None, "none")
    assert choose_switches("low", False, {OFF}) == OFF
