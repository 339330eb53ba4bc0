"""Training: configuration, recipes, and Lightning around a framework. Loaded when it is used,
because it pulls in Lightning."""
