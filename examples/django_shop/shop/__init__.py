"""A shop whose orders are placed once, however often a button is clicked."""
