"""A page of kinfolk: one HTML file that needs nothing else, neither a network nor a neighbour on disk.

Every word of the data passes through the template's escaping; what the scripts read is JSON without a single angle bracket; and the page's
own policy lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from kinfolk.errors import without_controls
from kinfolk.files import write_text

Part = tuple[str, str]
"""Package and name of a file that a page is made of."""
HERE = "kinfolk.report"


def compose(
    template: Part,
    scripts: Sequence[Part],
    *,
    data: Mapping[str, Any],
    title: str,
    sections: Sequence[tuple[str, str]],
    sheet: str | None = None,
    **words: Any,
) -> str:
    """The text of a page.

    Args:
        template: extends `shell.html`.
        scripts: run one after the other, after `shell.js`.
        data: what they read, by its name; None is left out.
        title: of the browser's tab.
        sections: id and name of each, for the bar at the top.
        sheet: data URI of the pictures that tiles show.
        words: what else the template names.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    package, name = template
    files = {"shell.html": HERE, "parts.html": HERE, name: package}
    environment = Environment(
        loader=FunctionLoader(lambda asked: _file(files[asked], asked)),
        autoescape=True,
        finalize=without_controls,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = [_file(*part) for part in ((HERE, "shell.js"), *scripts)]
    early, script, plotly = _file(HERE, "theme.js"), "\n".join([*parts, "page.start();\n"]), get_plotlyjs()
    return environment.get_template(name).render(
        title=title,
        sections=sections,
        sheet=sheet,
        version=metadata.version("kinfolk"),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        policy=policy(early, plotly, script),
        style=Markup(_file(HERE, "page.css")),
        early=Markup(early),
        plotly=Markup(plotly),
        script=Markup(script),
        data={id: Markup(script_json(value)) for id, value in data.items() if value is not None},
        **words,
    )


def write_page(path: Path, page: str) -> None:
    """Writes the file whole or not at all. A name that is not valid Unicode reaches us with lone surrogates."""
    write_text(path, page.encode("utf-8", "replace").decode())


def script_json(value: Any) -> str:
    """JSON that can stand in a script element: no character in it can end the element or open another."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(*scripts: str) -> str:
    """Content security policy: only these scripts, pictures inside the page, no network."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


def _file(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
