"""Servers of other makers (vLLM, SGLang): one engine; `protocol.py` describes the differences between the servers."""
