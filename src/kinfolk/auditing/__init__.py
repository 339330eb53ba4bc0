"""The audit: which samples of any embedding would be false negatives of each other."""

from kinfolk.auditing.conduct import audit
from kinfolk.auditing.result import Audit

__all__ = ["Audit", "audit"]
