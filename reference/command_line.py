"""The page of the command line: every command of the three programs, from the output of `--help`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import typer

from reference.markdown import cell, code, prose, table
from reference.values import bounds_of, kind_of


def page(programs: dict[str, typer.Typer]) -> str:
    """Return all commands, each with its arguments, options and examples."""
    parts = [
        "# Command line\n",
        "Every command prints the same with `--help`. `gateway --install-completion`, and the same of the other programs, makes"
        " your shell complete commands, options and their values from its next start on; `--show-completion` only prints the"
        " script. An error is one paragraph on standard error; the exit status is 2 for a wrong command line or file, and 1 for"
        " what failed. `--debug` shows the tracebacks of unexpected errors.\n",
    ]
    for name, app in programs.items():
        parts += [f"## `{name}`\n", f"{prose(app.info.help or '')}\n"]
        for path, command in _leaves(typer.main.get_command(app), name):
            parts.append(f"### `{path}`\n")
            parts.append(_help(command.help or ""))
            if rows := [_row(one) for one in command.params if not getattr(one, "hidden", False)]:
                parts.append(table(("argument or option", "value", "default", "meaning"), rows))
    return "\n".join(parts)


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from _leaves(child, f"{path} {name}")


def _help(text: str) -> str:
    """Return the paragraphs of a help text; indented ones are examples."""
    parts = []
    for part in text.split("\n\n"):
        lines = part.split("\n")
        if lines[0].startswith("  "):
            parts.append("```sh\n" + "\n".join(line.strip() for line in lines) + "\n```")
        else:
            parts.append(prose(part))
    return "\n\n".join(parts).replace("\n```\n\n```sh\n", "\n") + "\n"


def _row(parameter: Any) -> tuple[str, str, str, str]:
    argument = parameter.param_type_name == "argument"
    names = parameter.name.upper() if argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
    kind = parameter.type_descriptor.annotation
    bounds = bounds_of([SimpleNamespace(ge=parameter.min, le=parameter.max)], kind)
    value = "" if getattr(parameter, "is_flag", False) else ", ".join([kind_of(kind), *bounds])
    environment = f" Or `{parameter.envvar}` in the environment." if parameter.envvar else ""
    given = parameter.default in (None, False, ())
    default = "needed" if parameter.required else "" if given else code(str(parameter.default))
    return code(names), value, default, cell((parameter.help or "") + environment)
