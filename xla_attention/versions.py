"""The one set of torch, torch_xla, JAX and libtpu that works together, checked against what is installed.

The pins stand in ``pyproject.toml``; here they are read from the installed package's metadata.
"""

from __future__ import annotations

import re
from importlib import metadata

CHECKED = ("torch", "torch_xla", "jax", "jaxlib", "libtpu")


def check_versions() -> None:
    """Compares the installed packages with the pinned set.

    Raises:
        ImportError: a package is missing or has another version; the message says what is installed, what is
            needed, and the command that installs it.
    """
    pins = pinned()
    wrong = [name for name in CHECKED if installed(name) != _version_of(pins[name])]
    if wrong:
        found = ", ".join(f"{name} {installed(name) or 'is missing'}" for name in wrong)
        needed = ", ".join(pins[name] for name in wrong)
        everything = " ".join(f"'{pins[name]}'" for name in CHECKED)
        raise ImportError(
            f"xla_attention needs one set of versions that work together. Found: {found}. "
            f"Needed: {needed}. Install it with: pip install {everything}"
        )


def pinned() -> dict[str, str]:
    """The requirement of each checked package, such as ``{"jax": "jax==0.7.1", ...}``.

    Raises:
        ImportError: the package runs from a folder without being installed.
    """
    try:
        lines = metadata.requires("xla-attention") or []
    except metadata.PackageNotFoundError:
        raise ImportError("xla_attention is not installed; in its folder: pip install --editable .") from None
    requirements = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", requirement)
        if name and name[0] in CHECKED and "extra" not in marker:
            requirements[name[0]] = requirement.strip()
    return requirements


def installed(name: str) -> str | None:
    """The installed version of ``name`` less a local suffix such as ``+cpu``; None where it is missing."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _version_of(requirement: str) -> str:
    return requirement.partition("==")[2]
