"""Delivery of new weights to inference: channels, versions and digests."""
