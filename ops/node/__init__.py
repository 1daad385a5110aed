"""The node under the services: what it is, what is wrong with it, what would change."""
