"""Training data that the target writes itself."""
