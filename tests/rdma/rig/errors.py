"""Why the rig cannot be had on a machine."""


class RigUnavailable(Exception):
    """This machine cannot run the rig; the text is a clause that fits after "because"."""
