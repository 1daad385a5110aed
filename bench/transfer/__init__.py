"""How fast bytes move from one process's memory to another's; run ``python -m bench.transfer``."""
