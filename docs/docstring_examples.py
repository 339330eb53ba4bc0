"""A griffe extension: lets the API page show the section `Example:` of a docstring as code."""

from __future__ import annotations

from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Renames `Example:` to `Examples:`, which is the name of the section in griffe's parser."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            lines = obj.docstring.value.split("\n")
            obj.docstring.value = "\n".join(
                "Examples:" if line == "Example:" else line for line in lines
            )
