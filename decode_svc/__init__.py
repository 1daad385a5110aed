"""Decode workers turn KV caches into tokens; memory-bound, they decide TPOT."""
