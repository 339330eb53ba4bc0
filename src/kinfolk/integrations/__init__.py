"""Losses and detectors of kinfolk in the trainers of other libraries, which are installed by the
user."""
