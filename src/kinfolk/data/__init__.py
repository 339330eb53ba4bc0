"""Data: images from any source, each with a stable sample id, decoded once, and their augmented
views."""
