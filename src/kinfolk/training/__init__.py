"""Training: configuration, recipes, and Lightning around a framework."""
