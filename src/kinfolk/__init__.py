"""Contrastive representation learning that knows its false negatives."""
