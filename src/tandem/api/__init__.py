"""The nouns and contracts that the rooms share."""
