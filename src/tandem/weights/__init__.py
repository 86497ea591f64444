"""How new weights reach inference: channels, versions and digests."""
