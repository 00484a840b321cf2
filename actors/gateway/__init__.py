"""The HTTP side of serving: access, admission, validation, retries and streams, as one FastAPI application.

app.py has the routes, gateway.py the path of one request, replicas.py the way to the engines; the rest are its parts.
"""
