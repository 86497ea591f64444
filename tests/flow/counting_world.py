"""An environment that a test registers: one file, and one line in the table."""


class CountingWorld:
    def __init__(self, id: str):
        self.id = id
