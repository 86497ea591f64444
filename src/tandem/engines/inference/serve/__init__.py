"""The embedded engine as a server: routes, what they accept, who may call them, and the translation of OpenAI's protocol."""
