"""Images and sounds: reading, normalising, and the store that keeps each once."""
