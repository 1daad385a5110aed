"""The operator's tools: pdctl, the bootstrap, the checks."""
