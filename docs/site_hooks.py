"""Of the site that mkdocs builds: what pages link to outside docs/ (examples, sources, results) comes with it."""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")
FOLDER = "repository"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    linked = {
        target
        for page in files.documentation_pages()
        for target, _ in OUTSIDE.findall(page.content_string)
        if (ROOT / target).is_file()
    }
    for target in sorted(linked):
        # Not as pages of the site: history keeps the form that it was written in.
        name = f"{FOLDER}/{target}.txt" if PurePosixPath(target).suffix in (".md", ".py") else f"{FOLDER}/{target}"
        files.append(File.generated(config, name, content=(ROOT / target).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def inside(match: re.Match[str]) -> str:
        target = match[1]
        return f"]({FOLDER}/{target}{'.txt' if PurePosixPath(target).suffix in ('.md', '.py') else ''})"

    return OUTSIDE.sub(inside, markdown)
