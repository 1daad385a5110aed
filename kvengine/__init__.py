"""The torch side of both workers: a paged KV pool and a model that reads and writes it."""
