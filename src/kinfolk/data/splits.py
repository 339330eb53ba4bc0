"""The names of splits, defined once for data sources, training and evaluation."""

from __future__ import annotations

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""What a folder or an archive at the top of a source is called, and the split it is."""
_ALIASES = {**SPLITS, "training": "train", "dev": "val", "testing": "test", "": "train"}
VALIDATION_SPLITS = ("val", "valid", "validation")
"""Names of a validation split: the only other split that may steer a training."""
TEST_SPLITS = ("test", *VALIDATION_SPLITS)
"""The splits that accuracy is measured on, in order of preference."""


def split_name(given: str) -> str:
    """The split that a table or a mapping calls `given`: "train", "val" or "test"; another name stays as it is, in lower case.

    Example:
        >>> split_name(" Validation "), split_name("dev"), split_name("test-2017")
        ('val', 'val', 'test-2017')
    """
    name = given.strip().lower()
    return _ALIASES.get(name, name)
