"""The viewer: recorded runs as a web page, and as one HTML file. It only reads; its index lives in the cache. No torch."""
