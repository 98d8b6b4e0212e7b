"""Check a built site: every link inside it leads somewhere, and no page loads anything from elsewhere.

python docs/check_site.py docs/_build/html
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names, links or loads."""
        given = {key: value or "" for key, value in attrs}
        self.anchors.update(given[key] for key in ("id", "name") if key in given)
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "shortcut icon"):
            self.loaded.add(given["href"])
        if tag in ("script", "img", "iframe", "source", "video") and "src" in given:
            self.loaded.add(given["src"])


def problems(site: Path) -> list[str]:
    """Return a line for each broken link and each file loaded from elsewhere."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}
    out = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for link in sorted(page.links | page.loaded):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.loaded and url.scheme != "data":
                    out.append(f"{name} loads {link}")
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                out.append(f"{name} links {link}: no such file")
            elif target in pages and unquote(url.fragment) not in pages[target].anchors:
                out.append(f"{name} links {link}: no such place on that page")
    return out


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]))
    print(*found, f"{len(found)} problems", sep="\n")
    sys.exit(bool(found))
