"""``python -m router_svc``: run the router."""

from router_svc.config import RouterConfig
from svckit.command import service_command

main = service_command(
    "router",
    RouterConfig,
    "router_svc.service:serve",
    "The OpenAI-compatible HTTP router in front of prefill and decode workers.",
)

if __name__ == "__main__":
    main()
