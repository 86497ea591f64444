"""Engines behind HTTP: the client of `tandem serve`, and the server processes that a run starts. `foreign`: vLLM, SGLang."""
