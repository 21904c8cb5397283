"""The command that adds an extra to this installation: by name only where headgate came from an index of packages."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_command(extra: str) -> str:
    """Return the command, for the folder, file or address from which headgate was installed."""
    try:
        origin = distribution("headgate").read_text("direct_url.json")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return f"pip install '.[{extra}]' in headgate's folder"
    return f"pip install {_source(json.loads(origin or '{}'), extra)}"


def _source(origin: dict[str, dict[str, str]], extra: str) -> str:
    """Return pip's name of an origin as PEP 610 records it."""
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        editable = "--editable " if origin["dir_info"].get("editable") else ""
        return f"{editable}'{url2pathname(urlsplit(url).path)}[{extra}]'"
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return f"'headgate[{extra}]{f' @ {url}' if url else ''}'"
