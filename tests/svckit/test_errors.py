from svckit.errors import ConfigError, InvalidTransition, ServiceError


def test_config_error_is_a_service_error() -> None:
    assert issubclass(ConfigError, ServiceError)
    assert str(ConfigError("One sentence.")) == "One sentence."


def test_invalid_transition_is_a_defect_and_carries_the_story() -> None:
    error = InvalidTransition("stopped", "ready", ("stop: serving -> stopped",))
    assert not isinstance(error, ServiceError)
    assert (error.state, error.step) == ("stopped", "ready")
    assert "stop: serving -> stopped" in str(error)
