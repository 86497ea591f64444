"""The wire between processes: an HTTP client and an HTTP server with size limits, tokens and checked bodies. Imports no
model and no engine."""
