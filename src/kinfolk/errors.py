"""The errors a user can cause; the command line shows their message alone."""

from __future__ import annotations

from kinfolk.foreign import shown


class KinfolkError(ValueError):
    """Something the user can mend: what was wrong, what was received, what to do. Control characters in the message are escaped and
    its length is bounded: it may name files, classes and the like that others have named."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shown(message, 4000))


class UsageError(KinfolkError):
    """Wrong use: an unknown name, a value out of range, options that exclude each other."""


class KinfolkWarning(UserWarning):
    """Something that works but is rarely meant; `kinfolk train` writes it to the log as one line."""
