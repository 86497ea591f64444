"""The only modules of Tandem that run in the environments of vLLM and SGLang servers."""
