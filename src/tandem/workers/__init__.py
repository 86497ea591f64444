"""Worker processes that run what nobody trusts to end: each can be killed with everything that it started."""
