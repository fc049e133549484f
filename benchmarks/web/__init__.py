"""A web server with an app and a contender around it, and a client that keeps it busy."""
