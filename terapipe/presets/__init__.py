"""Published figures as JSON, read by importlib.resources."""
