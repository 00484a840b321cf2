"""The engine: one thread that owns a model and runs rounds of many requests (loop.py); the rest are its parts."""
