"""Records what agents ask of the model behind an endpoint of OpenAI's kind, so that they can be trained."""
