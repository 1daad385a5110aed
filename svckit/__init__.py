"""The process kit of the services: configuration, lifecycle, logging, metrics, admin port."""
