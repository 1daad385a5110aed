"""What a probe program wrote: a JSON list of flat objects, read back into dataclasses."""

import json
from dataclasses import asdict
from typing import Any


def matching_entries(text: str, example: Any) -> list[dict[str, Any]]:
    """The objects whose fields have names and types of ``example``, a dataclass with scalars.

    Objects of another version and texts that are no JSON list are skipped.
    """
    try:
        entries: Any = json.loads(text)
    except ValueError:
        return []
    types = {name: type(value) for name, value in asdict(example).items()}
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
        and types.keys() == entry.keys()
        and all(type(entry[name]) is kind for name, kind in types.items())
    ]
