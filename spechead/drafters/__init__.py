"""Drafters: anything that proposes a tree for the tokens just committed."""
