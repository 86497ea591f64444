"""Tools that a model calls: functions, built-in ones, MCP servers; and the workflow of a chat with them."""
