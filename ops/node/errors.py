"""Errors of the node tool: one sentence for the person, exit code 1."""

from svckit.errors import ServiceError


class NodeError(ServiceError):
    """What could not be read, changed or taken back, and what to do."""
