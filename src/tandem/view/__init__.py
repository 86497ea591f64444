"""The viewer: shows recorded runs as a web page or as one HTML file. It only reads run folders, keeps its index in the
cache, and does not import torch."""
