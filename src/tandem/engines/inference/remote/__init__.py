"""Engines behind HTTP: the client, the processes that a run starts, `tandem serve`; `foreign` has those of other makers."""
