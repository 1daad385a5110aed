"""Start-up check that text is UTF-8 everywhere in this process.

Every file and socket of ours names its encoding, but libraries open files with the locale's:
a tokenizer read as Latin-1 does not fail, it answers wrongly.
"""

import locale
import sys

from svckit.errors import ServiceError


def check_encoding() -> None:
    """Raise ServiceError unless Python runs in UTF-8 mode or the locale's encoding is UTF-8."""
    if sys.flags.utf8_mode:
        return
    encoding = locale.getencoding()
    if encoding.lower().replace("-", "") != "utf8":
        raise ServiceError(
            f"The locale's encoding is {encoding}, not UTF-8; "
            "set PYTHONUTF8=1 or a UTF-8 locale such as LC_ALL=C.UTF-8."
        )
