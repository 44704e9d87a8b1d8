"""Measure acceptance length, speed-up and losslessness, and choose trees."""
