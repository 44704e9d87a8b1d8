"""Decode speculatively: trees, verification, sampling, and the loop."""
