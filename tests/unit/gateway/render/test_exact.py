"""Over all families and all kinds of conversations: what is recorded is what the engine was given and what it sampled.

The ground truth is independent: the template's own rendering of the whole conversation.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.families.conversation import TOOLS, Episode, Reply, results
from tests.families.family import FAMILIES, Family, named, reference, renderer

LETTERS = "ab he.ll\n\"'{}é日🙂"
words = st.text(alphabet=LETTERS, min_size=1, max_size=12).map(lambda s: f"w{s}w")
replies = st.builds(
    Reply,
    content=words,
    thought=st.one_of(st.none(), words),
    calls=st.lists(st.tuples(st.sampled_from(["look", "write_é"]), words), max_size=2).map(tuple),
    letters=st.booleans(),
    cut=st.one_of(st.none(), st.none(), st.floats(0, 1)),
)
steps = st.lists(
    st.tuples(replies, st.sampled_from(["user", "user", "edit", "system", "again"]), words),
    min_size=2,
    max_size=6,
)


def fit(family: Family, reply: Reply) -> Reply:
    """Return the reply reduced to what the family supports."""
    calls = reply.calls if family.tools else ()
    calls = calls if family.parallel else calls[:1]
    content = "" if calls and family.template in ("llama3_1", "mistral_v3") else reply.content
    return Reply(content, reply.thought if family.thinks else None, calls, reply.letters, reply.cut)


def play(family: Family, script: list[Any], *, tools: bool, system: bool) -> Episode:
    """Play a script: the agent returns the results of calls, and otherwise continues, edits, interrupts or repeats."""
    episode = Episode(family, TOOLS if tools and family.tools else ())
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be good"}] if system else []
    messages.append({"role": "user", "content": "hello the"})
    for reply, then, text in script:
        reply_message = episode.ask(
            messages,
            fit(
                family,
                reply if episode.tools else Reply(reply.content, reply.thought, (), reply.letters, reply.cut),
            ),
        )
        if then == "again":
            continue
        messages = [*messages, reply_message, *results(reply_message, text)]
        if then == "edit":
            at = next(i for i, m in enumerate(messages) if m["role"] == "user")
            messages[at] = {**messages[at], "content": messages[at]["content"] + text}
        if then == "system" and family.template not in ("gemma3", "mistral_v3"):
            messages.append({"role": "system", "content": text})
        if messages[-1]["role"] != "tool":
            messages.append({"role": "user", "content": text})
    return episode


def check(episode: Episode) -> None:
    for call in episode.calls:
        given, sampled = call.prompt.tolist(), call.sampled.tolist()
        assert episode.tree.path(call.place).tolist() == given + sampled
        if call.bridged:
            assert call.history is not None
            assert given[: len(call.history)] == call.history.tolist()
            if call.canonical or call.whole[: len(call.history)] == call.history.tolist():
                assert given == call.whole
        else:
            assert given == call.whole
    assert sum(node.sampled for node in episode.tree.nodes) == len(episode.calls)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@settings(max_examples=12)
@given(steps, st.booleans(), st.booleans())
def test_what_is_recorded_is_what_the_engine_was_given_and_sampled(
    name: str, script: list[Any], tools: bool, system: bool
) -> None:
    check(play(named(name), script, tools=tools, system=system))


TEMPLATES_ARE_THE_TRUTH = [
    f.name for f in FAMILIES if "thinking off" not in f.name and f.name != "deepseek v3 (library)"
]


@pytest.mark.parametrize("name", TEMPLATES_ARE_THE_TRUTH)
def test_a_rendering_is_what_the_checkpoints_template_renders(name: str) -> None:
    family, chat = named(name), renderer(name)
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"text": "é"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "hi"},
    ]
    if family.tools:
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "content": "found", "tool_call_id": "call00000"}]
    tools = TOOLS if family.tools else []
    if family.template == "deepseek_v3":
        messages = messages[:2]
    rendered = reference(name).apply_chat_template(
        messages,
        tools=tools or None,
        add_generation_prompt=True,
        enable_thinking=family.thinking,
        return_dict=False,
    )
    assert chat.render(messages, tools) == list(rendered)
