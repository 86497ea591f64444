"""Tools that a model calls: user functions, built-in tools, MCP servers; and the workflow of a chat with tools."""
