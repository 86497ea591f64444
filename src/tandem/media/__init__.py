"""Images and sounds: reading, normalising, and the store that holds each once."""
