"""Servers of other makers (vLLM, SGLang): one engine over what differs between them, `protocol.py`."""
