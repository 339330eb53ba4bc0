"""Images from any source, each with a stable id, decoded once."""
