"""MkDocs hook: fill in the parts of the pages that are made from the code."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]  # this tree's modules, whichever pistar is installed

from docs_reference import fill  # noqa: E402  # once it can be found


def on_page_markdown(markdown: str, **_: Any) -> str:  # noqa: ANN401  # MkDocs' own objects
    """Replace `<!-- generated: NAME -->` by what is made from the code."""
    return fill(markdown)
