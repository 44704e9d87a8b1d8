"""Train a head: the loop, the engine, recipes and run folders."""
