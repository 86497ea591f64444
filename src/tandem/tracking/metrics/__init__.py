"""Every metric in words, one file for the room that measures it; `tandem.tracking.catalog` puts them together."""
