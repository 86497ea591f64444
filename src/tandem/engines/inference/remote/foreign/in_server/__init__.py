"""All of Tandem that the environments of vLLM and SGLang servers get to see."""
