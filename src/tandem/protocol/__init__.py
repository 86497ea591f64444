"""The wire between processes: an HTTP client and server with limits, keys and checked bodies. No model, no engine."""
