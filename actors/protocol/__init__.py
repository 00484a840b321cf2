"""OpenAI's protocol: request and response types, and the one function that turns a request into tokens (calls.py)."""
