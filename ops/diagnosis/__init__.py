"""What is wrong with the running services, and what slows them down."""
