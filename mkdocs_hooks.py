"""The site's hooks for MkDocs: the notes of lab/, links into the repository, Markdown for programs, Mermaid from this site.

The site has the pages of docs/, and lab/notes as `notes`. Links between them, written as a Git host shows them, become links
of the site. A link to another file of the repository (`../../gateway/api`) becomes its path in code; a file that does not exist
is a warning, and so ends a strict build.

Each page is also in the site as Markdown (`guide/faq.md` for `guide/faq/`), and `llms.txt` lists them all.

The browser draws Mermaid's diagrams. The theme would fetch the program for it from a CDN; a page that has a drawing loads the
file that `make docs` has put into `.cache`. No page asks another host for anything.
"""

from __future__ import annotations

import logging
import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
MERMAID = "assets/mermaid.min.js"
FOREIGN = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
LINK = re.compile(r"(!?)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")
SOURCES = {"docs/": "", "lab/notes/": "notes/"}
"""Where the folders of the repository are in the site."""
log = logging.getLogger("mkdocs.hooks.headgate")


def on_config(config: Any) -> Any:
    """Name the version below each page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.copyright = f"headgate {project['version']}, {project['license']}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the notes, and the program that draws. Raise PluginError where it was not fetched."""
    for note in sorted((ROOT / "lab" / "notes").glob("*.md")):
        files.append(File.generated(config, f"notes/{note.name}", abs_src_path=str(note)))
    drawers = sorted((ROOT / ".cache").glob("mermaid-*.min.js"))
    if not drawers:
        raise PluginError(
            ".cache/mermaid-*.min.js is missing, which draws the pages' diagrams: `make docs` fetches it"
        )
    files.append(File.generated(config, MERMAID, abs_src_path=str(drawers[-1])))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Return the page with links of the site, and write it next to its HTML."""
    uri = page.file.src_uri
    source = f"lab/{uri}" if uri.startswith("notes/") else f"docs/{uri}"
    if (repository := config.extra["repository"]) and not uri.startswith("reference/"):
        page.edit_url = f"{repository}/edit/main/{source}"

    def replace(link: re.Match[str]) -> str:
        image, text, path, anchor = link.groups(default="")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if (inside := _in_site(target)) and files.get_file_from_path(inside):
            return f"{image}[{text}]({posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{anchor})"
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which does not exist", source, target)
        ends = target.endswith(text.strip("`").rstrip("/"))
        return f"`{target}`" if ends else f"{text} (`{target}`)"

    written = LINK.sub(replace, markdown)
    out = Path(config.site_dir, uri)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(written, encoding="utf-8")
    return written


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Let a page that has a drawing load what draws it. Raise PluginError for a page that would ask another host."""
    if foreign := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} would ask another host: {foreign[0]}")
    if 'class="mermaid"' not in output:
        return output
    source = posixpath.relpath(MERMAID, page.url or ".")
    return output.replace("</head>", f'<script src="{source}"></script></head>', 1)


def on_post_build(config: Any) -> None:
    """Write llms.txt: each page's title and its Markdown, in the order of the navigation."""
    lines = [f"# {config.site_name}\n", f"> {config.site_description}\n", *_listed(config.nav, "")]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _in_site(path: str) -> str:
    """Return where a file of the repository is in the site; empty for a file that is not in it."""
    return next((place + path.removeprefix(at) for at, place in SOURCES.items() if path.startswith(at)), "")


def _listed(items: list[Any], part: str) -> Iterator[str]:
    """Yield a line for each page, and a heading for each part of the navigation; `part` is the one that has the items."""
    for item in items:
        name, value = next(iter(item.items())) if isinstance(item, dict) else (_heading(item), item)
        if isinstance(value, str):
            yield f"- [{name}]({value})"
        else:
            if not part:
                yield f"\n## {name}\n"
            yield from _listed(value, name)


def _heading(uri: str) -> str:
    return (ROOT / "docs" / uri).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
