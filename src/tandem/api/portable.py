"""Errors that travel from one process to another."""

import pickle


def survives_pickling(error: Exception) -> bool:
    """True if the error comes out as it went in; those of some libraries do not."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # the worker boundary: whatever pickling raises, the error itself is told in words instead
        return False
    return type(copy) is type(error) and str(copy) == str(error)
