"""Conversations: chat templates, samples and batches, prompts."""
