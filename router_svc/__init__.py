"""The router: OpenAI's HTTP interface in front, kvproto to the workers behind.

Imports svckit, kvproto and a tokenizer; never torch.
"""
