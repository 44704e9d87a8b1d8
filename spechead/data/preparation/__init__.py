"""Conversations to a data set of samples on disk."""
