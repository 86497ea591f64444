"""Environments: the other speaker of a chat, in worker processes, and adapters for those of other libraries."""
