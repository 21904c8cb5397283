"""Pure ASGI middleware around the routes; `gateway/app.py` lists it from outer to inner."""
