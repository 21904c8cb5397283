"""BAML: a client that its command generates, over chat completions, responses and messages."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from baml_py import ClientRegistry

from tests.compat.clients.gate import HELLO, MODEL, Episode

PROVIDERS = ("openai-generic", "openai-responses", "anthropic")
SOURCE = """
generator target {{
  output_type "python/pydantic"
  output_dir ".."
  version "{version}"
  default_client_mode sync
}}
class Person {{
  name string
  age int
}}
function Greet(text: string) -> string {{
  client "openai/unused"
  prompt #"{{{{ _.role("user") }}}}{{{{ text }}}}"#
}}
function Describe(text: string) -> Person {{
  client "openai/unused"
  prompt #"{{{{ _.role("user") }}}}{{{{ text }}}} {{{{ ctx.output_format }}}}"#
}}
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the generated functions."""
    folder = tmp_path_factory.mktemp("baml")
    (folder / "baml_src").mkdir()
    (folder / "baml_src" / "main.baml").write_text(SOURCE.format(version=version("baml-py")))
    command = [str(Path(sys.executable).with_name("baml-cli")), "generate"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    sys.path.insert(0, str(folder))
    import baml_client

    return baml_client.b


def options(episode: Episode, provider: str) -> Any:
    registry = ClientRegistry()
    values = {"model": MODEL, "base_url": episode.base_url, "api_key": episode.api_key}
    if provider == "anthropic":
        values |= {"base_url": episode.root}
    registry.add_llm_client("Policy", provider, values)
    registry.set_primary("Policy")
    return {"client_registry": registry}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_reply(provider: str, functions: Any, episode: Episode) -> None:
    assert functions.Greet("hello", options(episode, provider)) == HELLO
    episode.check(turns=1)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stream(provider: str, functions: Any, episode: Episode) -> None:
    stream = functions.stream.Greet("hello", options(episode, provider))
    assert list(stream)
    assert stream.get_final_response() == HELLO
    episode.check(turns=1)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_typed_reply_is_parsed_and_not_constrained(provider: str, functions: Any, episode: Episode) -> None:
    text = 'Make a person.\nSCRIPT: {"name": "Ada", "age": 36}\n'
    person = functions.Describe(text, options(episode, provider))
    assert (person.name, person.age) == ("Ada", 36)
    episode.check(turns=1)
    assert not any(any(node.get("flags") or ()) for node in episode.nodes())
