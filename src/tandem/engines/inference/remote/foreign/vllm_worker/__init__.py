"""All of Tandem that the environment of a vLLM server gets to see."""
