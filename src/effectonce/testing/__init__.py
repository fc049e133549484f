"""For tests of stores and of code that uses effectonce."""
