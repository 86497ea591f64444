"""Further places for metrics, one file each; their libraries are optional."""
