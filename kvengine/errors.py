"""Errors of the engine.

EngineError
├── ModelLoadError      the model folder cannot be served (missing, incomplete, unsupported)
├── PoolTooSmall        the KV pool cannot hold what was asked of it
└── InvalidBatch        a caller handed in spans or parameters that break the engine's contract

Every message is one sentence or two: what happened, where, and what to do.
"""


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ModelLoadError(EngineError):
    """The model folder cannot be loaded or uses a feature that this engine does not compute."""


class PoolTooSmall(EngineError):
    """The configured KV pool cannot hold even one sequence of the configured length."""


class InvalidBatch(EngineError):
    """Spans or sampling parameters break the contract; the batch was not computed."""
