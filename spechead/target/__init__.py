"""The frozen target: loading, tapped layers, cache, attention, adapters."""
