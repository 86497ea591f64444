"""Folders of what is made once and may be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of what is made once: ``$TANDEM_CACHE``, else ``tandem`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("TANDEM_CACHE") or f"{base}/tandem"))


def media_folder() -> Path:
    """The folder of the media store: ``$TANDEM_MEDIA``, else ``media`` in the cache."""
    return Path(os.path.expanduser(os.environ.get("TANDEM_MEDIA") or cache_folder() / "media"))
