"""The Python that looks, as a fact: a dump made on one machine is read on another one."""

from ops.node.facts import Facts


def interpreter(facts: Facts) -> str:
    """How the looking program was started: "python3", or a path into an environment."""
    command_line = facts.text("/proc/self/cmdline") or ""
    first = command_line.partition("\0")[0]
    # Anything else started us (an embedding program): the one that is on the path.
    return first if "python" in first.rpartition("/")[2] else "python3"
