"""The audit: which samples of any embedding would be false negatives of each other."""

from kinfolk.auditing.result import Audit
from kinfolk.auditing.run_audit import audit

__all__ = ["Audit", "audit"]
