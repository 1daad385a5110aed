"""Which release of this program runs, for the health answer and for comparing workers."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

DISTRIBUTION: Final = "pdserve"


def program_version() -> str:
    """The installed version; "" if it runs from a checkout that was never installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
