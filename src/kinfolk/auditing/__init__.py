"""The audit finds, in any embedding, the samples that would be false negatives of each other."""

from kinfolk.auditing.run_audit import Audit, audit

__all__ = ["Audit", "audit"]
