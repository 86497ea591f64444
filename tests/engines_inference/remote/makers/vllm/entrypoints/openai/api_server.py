"""Adds the middleware that it is told, and listens."""

import importlib

from door import Door, option

if __name__ == "__main__":
    door = Door()
    module, name = option("--middleware").rsplit(".", 1)
    door.add_middleware(getattr(importlib.import_module(module), name))
    door.serve(int(option("--port")))
