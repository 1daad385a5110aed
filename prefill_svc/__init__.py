"""Prefill workers turn prompts into KV caches; arithmetic-bound, they decide TTFT."""
