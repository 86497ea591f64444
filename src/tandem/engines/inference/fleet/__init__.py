"""Several inference servers behind one engine: health, routing, delivery of weights, joining and leaving."""
