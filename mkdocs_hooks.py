"""The site's hooks for MkDocs: links into the repository, and drawings without another host.

Pages link to files of the repository (`../gateway/api`), as a Git host shows them. The site has no such files: there a link
becomes the path in code. A link to a file that does not exist is a warning, and so ends a strict build.

Drawings in Mermaid are drawn by the browser. The theme would fetch the program for it from a CDN; a page that has a drawing
brings it along instead, from the file that `make docs` has put into `.cache`. No page asks another host for anything.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
MERMAID = "assets/mermaid.min.js"
FOREIGN = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]*)(?:#[^)]*)?\)")
log = logging.getLogger("mkdocs.hooks.headgate")


def on_files(files: Files, config: Any) -> Files:
    """Adds the program that draws. Raises PluginError where it was not fetched."""
    drawers = sorted((ROOT / ".cache").glob("mermaid-*.min.js"))
    if not drawers:
        raise PluginError(
            ".cache/mermaid-*.min.js is missing, which draws the pages' diagrams: `make docs` fetches it"
        )
    files.append(File.generated(config, MERMAID, abs_src_path=str(drawers[-1])))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links that leave docs/ into code."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target == "docs" or target.startswith("docs/"):
            return link[0]
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        said = link[1].strip("`")
        return f"`{target}`" if target.endswith(said.rstrip("/")) else f"{link[1]} (`{target}`)"

    return LINK.sub(replace, markdown)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Lets a page that has a drawing load what draws it. Raises PluginError for a page that would ask another host."""
    if foreign := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} would ask another host: {foreign[0]}")
    if 'class="mermaid"' not in output:
        return output
    source = posixpath.relpath(MERMAID, page.url or ".")
    return output.replace("</head>", f'<script src="{source}"></script></head>', 1)
