"""Every field of the table is refused with some value, and only then."""

import pytest

from router_svc.errors import InvalidRequestError
from router_svc.request_fields import RequestFields
from router_svc.unsupported_fields import HARMLESS_FIELDS, REFUSED_FIELDS, refuse_unsupported


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_refused_when_it_asks_for_something(name: str) -> None:
    with pytest.raises(InvalidRequestError) as info:
        refuse_unsupported(RequestFields({name: ["something"]}))
    assert (info.value.param, info.value.code) == (name, "unsupported_field")


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_null_asks_for_nothing(name: str) -> None:
    refuse_unsupported(RequestFields({name: None}))


def test_no_field_is_in_both_lists() -> None:
    assert not HARMLESS_FIELDS & REFUSED_FIELDS
