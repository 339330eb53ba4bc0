"""audit.html: one file that needs nothing else. What the data says is escaped by the template or set as text by the script."""

from __future__ import annotations

import math
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING

from kinfolk.auditing.figures import panels_of
from kinfolk.auditing.gallery import gallery, sprites
from kinfolk.report.page import policy, script_json

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit
    from kinfolk.data.images import ImageData


def write_page(audit: Audit, path: Path, images: ImageData | None = None) -> None:
    """Writes the page; without `images` the gallery shows names."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    shown = gallery(audit)
    sheet = sprites(shown["ids"], images)
    shown["tile"] = None if sheet is None else {"size": sheet.size, "columns": sheet.columns, "rows": sheet.rows}
    early, script, plotly = _file("kinfolk.report", "theme.js"), _file("kinfolk.auditing", "audit.js"), get_plotlyjs()
    style = _file("kinfolk.report", "page.css") + _file("kinfolk.auditing", "audit.css")
    panels = panels_of(audit)
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = template.from_string(_file("kinfolk.auditing", "audit.html")).render(
        lead=lead(audit),
        tiles=tiles(audit),
        panels=panels,
        batches=audit.batches,
        batch_basis=_basis(audit),
        has_groups=bool(shown["groups"]),
        has_hubs=bool(shown["hubs"]),
        has_labels=audit.labels is not None,
        num_anchors=len(shown["anchors"]),
        version=metadata.version("kinfolk"),
        policy=policy(early, plotly, script),
        style=Markup(style),
        sheet=None if sheet is None else sheet.uri,
        early=Markup(early),
        plotly=Markup(plotly),
        script=Markup(script),
        figures=Markup(script_json({panel.id: panel.figure for panel in panels})),
        gallery=Markup(script_json(shown)),
    )
    path.write_text(page, encoding="utf-8", errors="replace")


def lead(audit: Audit) -> str:
    """What was done, in a sentence or two."""
    start = f"Each of {len(audit):,} samples was compared with all others"
    kept = f"; those above the {1 - audit.alpha:.4g} quantile of its similarities are flagged as its kin."
    if not audit.flagged.any() and audit.alpha * (len(audit) - 1) < 1:
        kept += f" That is less than one of {len(audit) - 1:,}, so nobody is flagged; a larger alpha flags more."
    if audit.check is None:
        return f"{start}, exactly{kept}"
    check = audit.check
    return (
        f"{start}, approximately{kept} Against {check.anchors} anchors compared exactly, the search found {check.recall:.1%} of the "
        f"nearest, and thresholds are off by {check.threshold_error:.4f} on average."
    )


def tiles(audit: Audit) -> list[tuple[str, str, str]]:
    """Label, value and note of the figures at the top."""
    number = [
        ("Samples", f"{len(audit):,}", ""),
        ("Flagged pairs", _short(int(audit.flagged.sum())), f"α = {audit.alpha:g}; {len(audit.pairs):,} listed"),
        ("Suggested α", f"{audit.suggested_alpha:g}", "share of pairs that stands out"),
    ]
    if not math.isnan(audit.f1):
        number.append(
            ("Precision", "—" if math.isnan(audit.precision) else f"{audit.precision:.1%}", f"recall {audit.recall:.1%}, F1 {audit.f1:.3f}")
        )
        number.append(("Equal labels", f"{audit.kin_share:.1%}", "share of all pairs"))
    number.append(("Duplicates", f"{audit.num_groups('duplicate'):,}", f"and {audit.num_groups('near-duplicate'):,} near-duplicate groups"))
    number.append(("Hubs", f"{len(audit.hubs):,}", "samples that are kin of very many"))
    return number


def _basis(audit: Audit) -> str:
    if math.isnan(audit.kin_share):
        return f"if the suggested {audit.suggested_alpha:g} of all pairs are kin"
    return f"by the labels: {audit.kin_share:.2%} of all pairs share theirs"


def _short(number: int) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1_000_000 else f"{number:,}"


def _file(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
