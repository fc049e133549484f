"""What ``hostile_asgi`` and its tests agree on."""

STORE = "EFFECTONCE_TEST_HTTP_STORE"
"""The variable with the URL of the store, if it is not the world's own file."""
BODY_SECONDS = 0.3
HEADER_BYTES = 80_000
PIECE_BYTES = 1 << 16
