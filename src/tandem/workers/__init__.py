"""Worker processes for code that may hang or crash. Each can be killed together with every process that it started."""
