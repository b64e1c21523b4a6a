"""Check a built documentation site: no dead link or anchor, and nothing that a browser would load from the network.

python tools/check_site.py site
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {"href": ("link",), "src": (), "srcset": (), "poster": (), "data": ("object",), "action": ("form",)}
"""Attributes by which a page loads something, and the tags they do so on; empty: on all of them."""


class Page(HTMLParser):
    """What one page links to, loads, and can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.drawn_by_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value)
            if name == "href" and tag == "a":
                self.links.append(value)
            elif name in LOADING and (not LOADING[name] or tag in LOADING[name]):
                self.loaded.append(value)
            if name == "class" and {"mermaid", "arithmatex"} & set(value.split()):
                self.drawn_by_script = True


def _is_elsewhere(address: str) -> bool:
    return bool(re.match(r"\s*(\w+:)?//", address))


def problems(site: Path) -> Iterator[str]:
    """Each thing that is wrong with the site, as a sentence."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no pages."
    for path, page in pages.items():
        here = path.relative_to(site)
        for address in page.loaded:
            if _is_elsewhere(address):
                yield f"{here} loads {address} from the network."
        text = path.read_text(encoding="utf-8")
        for address in re.findall(r"(?:@import\s+|url\()[\"']?([^\"')]+)", text):
            if _is_elsewhere(address):
                yield f"{here} loads {address} from the network."
        if page.drawn_by_script:
            yield f"{here} has a diagram or a formula that a script from the network would draw."
        if path.name == "404.html":
            continue  # its links are made for a server's root
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{here} links to {link}, which does not exist."
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{here} links to {link}, but that page has no such anchor."
    for path in sorted(site.rglob("*.css")):
        for address in re.findall(r"(?:@import\s+|url\()[\"']?([^\"')]+)", path.read_text(encoding="utf-8")):
            if _is_elsewhere(address):
                yield f"{path.relative_to(site)} loads {address} from the network."


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1]).resolve()))
    sys.exit("\n".join(found) or None)
