"""Data: images with stable sample ids, decoded once, and their augmented views."""
