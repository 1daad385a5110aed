"""What a driver can be told."""

import dataclasses
import inspect
from typing import get_args

from kvproto import events


def test_the_union_names_every_event():
    classes = {item for _, item in inspect.getmembers(events, dataclasses.is_dataclass)}
    defined_here = {item for item in classes if item.__module__ == events.__name__}
    assert set(get_args(events.Event)) == defined_here


def test_events_are_frozen():
    for item in get_args(events.Event):
        assert item.__dataclass_params__.frozen
