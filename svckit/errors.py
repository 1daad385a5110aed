"""Errors a person can act on.

    ServiceError           the process cannot start or go on; the message is one full sentence
    ├── ConfigError        a setting is unknown, missing or out of range
    └── DrainDeadlineError work was left when the drain deadline passed
    InvalidTransition      a lifecycle step that the table does not hold (our own bug)

``run_service`` prints a ServiceError as that one sentence and exits 1. Anything else is a
defect of ours and is logged with its trace.
"""


class ServiceError(Exception):
    """A failure the operator can act on; ``str(error)`` is one sentence without a trace."""


class ConfigError(ServiceError):
    """A setting is unknown, missing, malformed or out of range; the message names it."""


class DrainDeadlineError(ServiceError):
    """Work was left, and aborted, when the drain deadline passed; exit code 3."""


class InvalidTransition(Exception):
    """A step that the lifecycle table does not hold; ``story`` lists the steps that led here."""

    def __init__(self, state: str, step: str, story: tuple[str, ...]) -> None:
        super().__init__(f"step {step} is not allowed in state {state}; before it: {story}")
        self.state = state
        self.step = step
        self.story = story
