"""Where downloads, converted models and logs of runs are kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

CACHE_VARIABLE: Final = "PD_CACHE_DIR"
_CHECKOUT: Final = Path(__file__).resolve().parent.parent


def cache_folder(env: Mapping[str, str], checkout: Path = _CHECKOUT) -> Path:
    """$PD_CACHE_DIR, or .cache in the checkout if this is one, or the user's cache folder."""
    if chosen := env.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    if (checkout / "pyproject.toml").is_file():
        return checkout / ".cache"
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "pdserve"
