"""Where the package keeps what it can make or fetch again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XLA_ATTENTION_CACHE``, else ``~/.cache/xla-attention``."""
    return Path(os.environ.get("XLA_ATTENTION_CACHE") or Path.home() / ".cache" / "xla-attention")
