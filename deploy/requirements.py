"""Prints a project's dependencies, one a line, but for those that are named: `requirements.py pyproject.toml torch`."""

import re
import sys
import tomllib
from pathlib import Path

project, *without = sys.argv[1:]
for line in tomllib.loads(Path(project).read_text())["project"]["dependencies"]:
    if re.split(r"[^\w.-]", line, maxsplit=1)[0] not in without:
        sys.stdout.write(f"{line}\n")
