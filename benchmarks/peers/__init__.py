"""What HTTP boundaries do in hostile cases, side by side: apps behind each of them, and the cases."""
