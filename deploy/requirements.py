"""Prints a project's dependencies, one a line, with those of extras: `requirements.py pyproject.toml trainer`."""

import sys
import tomllib
from pathlib import Path

path, *extras = sys.argv[1:]
project = tomllib.loads(Path(path).read_text())["project"]
for some in (project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)):
    sys.stdout.write("".join(f"{line}\n" for line in some))
