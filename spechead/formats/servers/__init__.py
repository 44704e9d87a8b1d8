"""One file a server: how it stores and loads heads."""
